"""The processor of ``any_thinker``."""

from collections.abc import AsyncIterator

from omni_ray.engine.types import AudioClip, Clip, ImageClip, Request
from omni_ray.models.any_thinker.prompt import ChatPrompt


async def prompt_of_chat(request: Request, clips: AsyncIterator[Clip]) -> AsyncIterator[ChatPrompt]:
    """Request -> thinker: the chat with all its media."""
    media = [clip async for clip in clips]
    sounds = {clip.index: clip for clip in media if isinstance(clip, AudioClip)}
    images = {clip.index: clip for clip in media if isinstance(clip, ImageClip)}
    yield ChatPrompt(request.messages, sounds, images)
