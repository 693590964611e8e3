"""Processors of ``ramp``, one per edge: async generators that turn an upstream's stream into a stage's inputs."""

from collections.abc import AsyncIterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omni_ray.engine.types import AudioClip, Chunk, CodeFrameChunk, LatentChunk, Request
from omni_ray.models.ramp.oracle import request_text, tag_of


@dataclass(frozen=True, slots=True)
class Word:
    """One word of the prompt."""

    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """One latent row: the request's tag and the token's index."""

    tag: int
    index: int


def encode_row(tag: int, index: int, width: int) -> NDArray[np.float32]:
    """A latent row [width]: float32 holds 16 bits exactly, so the tag travels in two halves."""
    row = np.zeros(width, np.float32)
    row[:3] = (tag >> 16, tag & 0xFFFF, index)
    return row


def decode_row(row: NDArray[np.float32]) -> Row:
    """The inverse of ``encode_row``."""
    return Row((int(row[0]) << 16) | int(row[1]), int(row[2]))


async def words_of_chat(request: Request, clips: AsyncIterator[AudioClip]) -> AsyncIterator[Word]:
    """Request -> thinker: the words of the last user message."""
    for word in request_text(request).split():
        yield Word(word)


async def rows_of_thinker(request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Row]:
    """Thinker -> talker: latent rows; the thinker's text is for the client."""
    async for chunk in chunks:
        if isinstance(chunk, LatentChunk):
            for row in chunk.rows:
                yield decode_row(row)


async def rows_of_speech(request: Request, clips: AsyncIterator[AudioClip]) -> AsyncIterator[Row]:
    """Request -> talker: the speech endpoint has no thinker, so rows are made from the words here."""
    tag = tag_of(request)
    for index, _ in enumerate(request_text(request).split()):
        yield Row(tag, index)


async def frames_of_talker(request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    """Talker -> code2wav: code frames as they are."""
    async for chunk in chunks:
        if isinstance(chunk, CodeFrameChunk):
            yield chunk
