"""Processors of request edges, put behind another stage: they get the request with a part of it written anew."""

from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal

from omni_ray.engine.types import Chunk, MediaPart, Request, TextChunk, TextPart, TranscriptChunk

Processor = Callable[[Request, AsyncIterator[Any]], AsyncGenerator[Any, None]]


def rewriting(processor: Processor, part: Literal["speech_text", "messages"]) -> Processor:
    """``processor`` behind a stage that makes text (for ``speech_text``) or transcripts (for ``messages``).

    It waits for everything that the stage makes. A text becomes what is to be spoken; transcripts take the places of
    their clips in the chat.
    """

    async def process(request: Request, chunks: AsyncIterator[Chunk]) -> AsyncGenerator[Any, None]:
        made = [chunk async for chunk in chunks]
        if part == "speech_text":
            text = "".join(chunk.text for chunk in made if isinstance(chunk, TextChunk)).strip()
            request = replace(request, speech_text=text)
        else:
            request = _heard(request, [chunk for chunk in made if isinstance(chunk, TranscriptChunk)])
        async with aclosing(processor(request, _nothing())) as inputs:
            async for item in inputs:
                yield item

    return process


async def _nothing() -> AsyncIterator[Any]:
    """No media: what was heard is text now."""
    return
    yield


def _heard(request: Request, chunks: list[TranscriptChunk]) -> Request:
    heard: defaultdict[int, list[str]] = defaultdict(list)
    for chunk in chunks:
        heard[chunk.clip].append(chunk.text.strip())

    def written(part: TextPart | MediaPart) -> TextPart | MediaPart:
        if isinstance(part, MediaPart) and part.kind == "audio":
            return TextPart(" ".join(heard[part.index]))
        return part

    messages = tuple(replace(m, content=tuple(map(written, m.content))) for m in request.messages)
    return replace(request, messages=messages)
