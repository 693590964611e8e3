"""Processors of ``qwen2_5_omni``, one per edge: who waits for what, and in which form it moves on."""

from collections import deque
from collections.abc import AsyncIterator

import numpy as np
from numpy.typing import NDArray

from omni_ray.engine.spoken import Heard
from omni_ray.engine.types import (
    AudioClip,
    Chunk,
    Clip,
    CodeFrameChunk,
    ImageClip,
    LatentChunk,
    PromptChunk,
    Request,
    TextChunk,
)
from omni_ray.errors import StageFailedError
from omni_ray.models.qwen2_5_omni.positions import ImageGrid
from omni_ray.models.qwen2_5_omni.prompt import ChatPrompt
from omni_ray.models.qwen2_5_omni.talker_input import TalkerPrompt, TalkerRows


async def prompt_of_chat(request: Request, clips: AsyncIterator[Clip]) -> AsyncIterator[ChatPrompt]:
    """Request -> thinker: the chat with all its media."""
    media = [clip async for clip in clips]
    sounds = {clip.index: clip for clip in media if isinstance(clip, AudioClip)}
    images = {clip.index: clip for clip in media if isinstance(clip, ImageClip)}
    yield ChatPrompt(request.messages, sounds, images)


async def talker_inputs(request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[TalkerPrompt | TalkerRows]:
    """Thinker -> talker: the prompt's rows, then the row of every token that was shown and is meant to be heard.

    A row waits for its token's text, which a stop string may still swallow.
    """
    prompt: PromptChunk | None = None
    speech: Speech | None = None
    async for chunk in chunks:
        if isinstance(chunk, PromptChunk):
            prompt = chunk
        elif prompt is None:
            raise StageFailedError("an answer arrived before the prompt it answers")
        elif speech is None:
            if not isinstance(chunk, LatentChunk) or chunk.segment or len(chunk.rows) != len(prompt.token_ids):
                raise StageFailedError(
                    f"the rows of the {len(prompt.token_ids)} positions of the prompt did not arrive"
                )
            speech = Speech(prompt)
            grids = tuple(ImageGrid(height, width) for _, height, width, _ in prompt.grids)
            yield TalkerPrompt(prompt.token_ids, chunk.rows, request.voice, grids)
        elif isinstance(chunk, LatentChunk | TextChunk):
            speech.take(chunk)
            if (rows := speech.ready()) is not None:
                yield TalkerRows(rows)


async def codes_of_talker(request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[CodeFrameChunk]:
    """Talker -> token2wav: codes as they are."""
    async for chunk in chunks:
        if isinstance(chunk, CodeFrameChunk):
            yield chunk


class Speech:
    """Brings an answer's rows and tokens together: rows of markup and tool calls are dropped, in order."""

    def __init__(self, prompt: PromptChunk) -> None:
        self._heard = Heard(prompt)
        self._next_row, self._next_token = len(prompt.token_ids), 0
        self._rows: deque[NDArray[np.float32]] = deque()
        self._tokens: deque[int] = deque()

    def take(self, chunk: LatentChunk | TextChunk) -> None:
        """What came next.

        Raises:
            StageFailedError: a row or a token is missing in between.
        """
        if isinstance(chunk, LatentChunk):
            if chunk.position != self._next_row:
                raise StageFailedError(f"row {chunk.position} of the thinker came where {self._next_row} was due")
            self._next_row += len(chunk.rows)
            self._rows.extend(chunk.rows)
        else:
            if chunk.position != self._next_token:
                raise StageFailedError(f"token {chunk.position} came where {self._next_token} was due")
            self._next_token += len(chunk.token_ids)
            self._tokens.extend(chunk.token_ids)

    def ready(self) -> NDArray[np.float32] | None:
        """Rows [n, hidden] whose tokens are known and heard; None if there are none now."""
        heard = []
        while self._rows and self._tokens:
            row, token = self._rows.popleft(), self._tokens.popleft()
            if self._heard.next(token):
                heard.append(row)
        return np.stack(heard) if heard else None
