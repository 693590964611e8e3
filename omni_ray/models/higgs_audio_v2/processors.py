"""The processors of ``higgs_audio_v2``'s edges."""

import asyncio
from collections.abc import AsyncIterator

from omni_ray.engine.reference_voice import spoken_turn
from omni_ray.engine.types import AudioClip, Chunk, CodeFrameChunk, Request
from omni_ray.models.higgs_audio_v2.delay import Realigned
from omni_ray.models.higgs_audio_v2.prompt import SAMPLE_RATE, HiggsPrompt


async def prompt_of_request(request: Request, clips: AsyncIterator[AudioClip]) -> AsyncIterator[HiggsPrompt]:
    """Request -> talker: the text to speak, after the recording if there is one.

    Raises:
        InvalidRequestError: the recording is none, or its text is missing: the model continues a conversation.
    """
    before = await asyncio.to_thread(spoken_turn, request.extras, SAMPLE_RATE)
    yield HiggsPrompt(request.speech_text or "", before)


async def frames_of_talker(request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[CodeFrameChunk]:
    """Talker -> code2wav: frames made of the talker's rows; the last seven rows of an answer complete none."""
    realigned, position = Realigned(), 0
    async for chunk in chunks:
        if isinstance(chunk, CodeFrameChunk) and len(frames := realigned.push(chunk.frames)):
            yield CodeFrameChunk(position, frames)
            position += len(frames)
