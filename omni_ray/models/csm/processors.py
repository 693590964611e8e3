"""The processors of ``csm``'s edges."""

import asyncio
from collections.abc import AsyncIterator

from omni_ray.engine.reference_voice import reference_voice
from omni_ray.engine.types import AudioClip, Chunk, CodeFrameChunk, Request
from omni_ray.errors import InvalidRequestError
from omni_ray.models.csm.prompt import DEFAULT_SPEAKER, SAMPLE_RATE, CsmPrompt, SpokenTurn


async def prompt_of_request(request: Request, clips: AsyncIterator[AudioClip]) -> AsyncIterator[CsmPrompt]:
    """Request -> talker: the text to speak, after the recording if there is one.

    Raises:
        InvalidRequestError: the recording is none, or its text is missing: the model continues a conversation, so it
            must know what was said.
    """
    reference = await asyncio.to_thread(reference_voice, request.extras, SAMPLE_RATE)
    before = None
    if reference is not None:
        if reference.text is None:
            raise InvalidRequestError("ref_text: csm needs the words that are said in ref_audio", "ref_text")
        before = SpokenTurn(reference.text, reference.samples)
    yield CsmPrompt(request.speech_text or "", request.voice or DEFAULT_SPEAKER, before)


async def frames_of_talker(request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[CodeFrameChunk]:
    """Talker -> code2wav: the frames as they come."""
    async for chunk in chunks:
        if isinstance(chunk, CodeFrameChunk):
            yield chunk
