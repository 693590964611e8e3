"""The processor of ``tone_tts``."""

from collections.abc import AsyncIterator

from omni_ray.engine.types import AudioClip, Request


async def letters_of_request(request: Request, clips: AsyncIterator[AudioClip]) -> AsyncIterator[str]:
    """Request -> talker: its letters, lower case."""
    for letter in (request.speech_text or "").lower():
        if "a" <= letter <= "z":
            yield letter
