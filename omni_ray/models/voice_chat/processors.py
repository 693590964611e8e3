"""Processors of ``voice_chat``, one per edge: who waits for what, and in which form it moves on."""

from collections import defaultdict
from collections.abc import AsyncIterator, Mapping

from omni_ray.engine.types import (
    AudioClip,
    Chunk,
    LatentChunk,
    MediaPart,
    Request,
    TextChunk,
    TextPart,
    TranscriptChunk,
)
from omni_ray.models.voice_chat.clauses import Clause, ClauseSplitter
from omni_ray.models.voice_chat.prompt import Prompt


async def clips_of_request(request: Request, clips: AsyncIterator[AudioClip]) -> AsyncIterator[AudioClip]:
    """Request -> listener: every clip, in order."""
    async for clip in clips:
        yield clip


async def prompt_of_chat(request: Request, clips: AsyncIterator[AudioClip]) -> AsyncIterator[Prompt]:
    """Request -> thinker: a chat without sound."""
    yield _prompt(request, {})


async def prompt_of_transcript(request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Prompt]:
    """Listener -> thinker: the chat with every clip replaced by what was heard, once all of it was heard."""
    heard: defaultdict[int, list[str]] = defaultdict(list)
    async for chunk in chunks:
        if isinstance(chunk, TranscriptChunk):
            heard[chunk.clip].append(chunk.text.strip())
    yield _prompt(request, {clip: " ".join(texts) for clip, texts in heard.items()})


def _prompt(request: Request, heard: Mapping[int, str]) -> Prompt:
    messages = []
    for message in request.messages:
        texts = [part.text if isinstance(part, TextPart) else heard.get(part.index, "") for part in message.content]
        joined = "".join(texts) if not _has_media(message.content) else " ".join(t for t in texts if t)
        messages.append((message.role, joined))
    return Prompt(tuple(messages))


def _has_media(content: tuple[TextPart | MediaPart, ...]) -> bool:
    return any(isinstance(part, MediaPart) for part in content)


async def clauses_of_thinker(request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Clause]:
    """Thinker -> talker: each clause as soon as the text that ends it has arrived."""
    splitter, count = ClauseSplitter(), 0
    async for chunk in chunks:
        if isinstance(chunk, TextChunk):
            for text in splitter.push(chunk.text):
                yield Clause(count, text)
                count += 1
    for text in splitter.finish():
        yield Clause(count, text)
        count += 1


async def clauses_of_speech(request: Request, clips: AsyncIterator[AudioClip]) -> AsyncIterator[Clause]:
    """Request -> talker: the same clause plan for a text that is known from the start."""
    splitter = ClauseSplitter()
    for count, text in enumerate((*splitter.push(request.speech_text or ""), *splitter.finish())):
        yield Clause(count, text)


async def latents_of_talker(request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[LatentChunk]:
    """Talker -> code2wav: latents as they are."""
    async for chunk in chunks:
        if isinstance(chunk, LatentChunk):
            yield chunk
