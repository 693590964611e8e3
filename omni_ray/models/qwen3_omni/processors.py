"""Processors of ``qwen3_omni``, one per edge: who waits for what, and in which form it moves on."""

from collections.abc import AsyncIterator

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
    VideoClip,
)
from omni_ray.errors import StageFailedError
from omni_ray.models.qwen3_omni.positions import Grid
from omni_ray.models.qwen3_omni.prompt import ChatPrompt
from omni_ray.models.qwen3_omni.talker_input import TalkerPrompt, TalkerText


async def prompt_of_chat(request: Request, clips: AsyncIterator[Clip]) -> AsyncIterator[ChatPrompt]:
    """Request -> thinker: the chat with all its media."""
    media = [clip async for clip in clips]
    sounds = {clip.index: clip for clip in media if isinstance(clip, AudioClip)}
    images = {clip.index: clip for clip in media if isinstance(clip, ImageClip)}
    videos = {clip.index: clip for clip in media if isinstance(clip, VideoClip)}
    yield ChatPrompt(request.messages, sounds, images, videos)


async def talker_inputs(request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[TalkerPrompt | TalkerText]:
    """Thinker -> talker: the prompt once, then every token that is to be spoken as soon as it is final.

    Lag one: upstream never speaks the last generated token. A stop token is in no chunk, so that leaves the one that
    hits ``max_tokens``, known by its position; no token has to be held back. Markup and tool calls are not spoken.
    """
    prompt: PromptChunk | None = None
    speech = Speech()
    waiting_rows = False
    async for chunk in chunks:
        if isinstance(chunk, PromptChunk):
            prompt, waiting_rows = chunk, chunk.rows > 0
            speech = Speech(chunk)
            if not waiting_rows:
                yield _talker_prompt(request, chunk, None)
        elif isinstance(chunk, LatentChunk) and prompt is not None and waiting_rows:
            waiting_rows = False
            yield _talker_prompt(request, prompt, chunk)
        elif isinstance(chunk, TextChunk):
            if prompt is None or waiting_rows:
                raise StageFailedError("text arrived before the prompt it answers")
            if spoken := speech.of(chunk):
                yield TalkerText(spoken)


async def frames_of_talker(request: Request, chunks: AsyncIterator[Chunk]) -> AsyncIterator[CodeFrameChunk]:
    """Talker -> code2wav: code frames as they are."""
    async for chunk in chunks:
        if isinstance(chunk, CodeFrameChunk):
            yield chunk


class Speech:
    """Which of one answer's tokens are spoken: all but markup, tool calls and the last one that ``limit`` allows."""

    def __init__(self, prompt: PromptChunk | None = None) -> None:
        prompt = prompt or PromptChunk(0, ())
        self._heard = Heard(prompt)
        self._last = None if prompt.limit is None else prompt.limit - 1

    def of(self, chunk: TextChunk) -> tuple[int, ...]:
        """The spoken ones of a chunk's tokens; chunks come in order."""
        return tuple(
            token
            for position, token in enumerate(chunk.token_ids, start=chunk.position)
            if self._heard.next(token) and position != self._last
        )


def _talker_prompt(request: Request, prompt: PromptChunk, rows: LatentChunk | None) -> TalkerPrompt:
    if rows is not None and len(rows.rows) != prompt.rows:
        raise StageFailedError(f"{len(rows.rows)} hidden rows arrived for {prompt.rows} media positions")
    return TalkerPrompt(
        prompt_ids=prompt.token_ids,
        speaker=request.voice,
        media_rows=None if rows is None else rows.rows,
        grids=tuple(Grid(*grid) for grid in prompt.grids),
    )
