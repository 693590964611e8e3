"""The processor of ``diffusion``."""

from collections.abc import AsyncIterator

from omni_ray.engine.types import Clip, ImagePrompt, Request


async def prompt_of_request(request: Request, clips: AsyncIterator[Clip]) -> AsyncIterator[ImagePrompt]:
    """Request -> painter: what to paint."""
    assert request.image_prompt is not None, "the plan reads image_prompt only where the request has one"
    yield request.image_prompt
