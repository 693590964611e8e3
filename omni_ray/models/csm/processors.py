"""The processors of ``csm``'s edges."""

import asyncio
from collections.abc import AsyncIterator

from omni_ray.engine.reference_voice import spoken_turn
from omni_ray.engine.types import AudioClip, Chunk, CodeFrameChunk, Request
from omni_ray.models.csm.prompt import DEFAULT_SPEAKER, SAMPLE_RATE, CsmPrompt


async def prompt_of_request(request: Request, clips: AsyncIterator[AudioClip]) -> AsyncIterator[CsmPrompt]:
    """Request -> talker: the text to speak, after the recording if there is one.

    Raises:
        InvalidRequestError: the recording is none, or its text is missing: the model continues a conversation, so it
            must know what was said.
    """
    before = await asyncio.to_thread(spoken_turn, request.extras, SAMPLE_RATE)
    yield CsmPrompt(request.speech_text or "", request.voice or DEFAULT_SPEAKER, before)


async def frames_of_talker(request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[CodeFrameChunk]:
    """Talker -> code2wav: the frames as they come."""
    async for chunk in chunks:
        if isinstance(chunk, CodeFrameChunk):
            yield chunk
