"""The processor of ``qwen3_tts``."""

from collections.abc import AsyncIterator

from omni_ray.engine.types import AudioClip, Request


async def text_of_request(request: Request, clips: AsyncIterator[AudioClip]) -> AsyncIterator[str]:
    """Request -> talker: the text to speak."""
    yield request.speech_text or ""
