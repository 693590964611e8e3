"""Who waits for what between the stages, and which tokens are spoken."""

from collections.abc import AsyncIterator, Iterable
from typing import Any

import numpy as np
import pytest

from omni_ray.engine.types import (
    AudioClip,
    Chunk,
    CodeFrameChunk,
    ImageClip,
    LatentChunk,
    MediaPart,
    Message,
    PromptChunk,
    Request,
    TextChunk,
    TextPart,
)
from omni_ray.errors import StageFailedError
from omni_ray.models.qwen3_omni.positions import Grid
from omni_ray.models.qwen3_omni.processors import frames_of_talker, prompt_of_chat, talker_inputs
from omni_ray.models.qwen3_omni.talker_input import TalkerPrompt, TalkerText

REQUEST = Request("r", seed=0, voice="Ethan")
PROMPT = PromptChunk(0, (1, 2, 3), limit=6)


async def stream(items: Iterable[Any], log: list[Any] | None = None) -> AsyncIterator[Any]:
    for item in items:
        if log is not None:
            log.append(item)
        yield item


async def spoken(chunks: list[Chunk]) -> list[int]:
    first, *texts = [item async for item in talker_inputs(REQUEST, stream(chunks))]
    assert isinstance(first, TalkerPrompt)
    assert all(isinstance(text, TalkerText) and text.token_ids for text in texts)
    return [token for text in texts if isinstance(text, TalkerText) for token in text.token_ids]


def words(*ids: int, start: int = 0) -> list[Chunk]:
    return [TextChunk(start + i, "x", (token,)) for i, token in enumerate(ids)]


async def test_a_chat_waits_for_all_its_media() -> None:
    sound = AudioClip(0, np.zeros(4, np.float32), 16000)
    image = ImageClip(1, np.zeros((2, 2, 3), np.uint8))
    messages = (Message("user", (MediaPart("audio", 0), TextPart("and"), MediaPart("image", 1))),)
    request = Request("r", seed=0, messages=messages)
    (prompt,) = [item async for item in prompt_of_chat(request, stream([sound, image]))]
    assert (prompt.messages, prompt.clips, prompt.images) == (messages, {0: sound}, {1: image})
    assert [part.kind for part in prompt.media()] == ["audio", "image"]


async def test_the_talker_gets_its_prompt_before_any_text_and_every_token_at_once() -> None:
    log: list[Any] = []
    seen: list[tuple[Any, int]] = []
    async for item in talker_inputs(REQUEST, stream([PROMPT, *words(10, 11, 12)], log)):
        seen.append((item, len(log)))
    prompt = TalkerPrompt((1, 2, 3), "Ethan")
    assert seen == [(prompt, 1), (TalkerText((10,)), 2), (TalkerText((11,)), 3), (TalkerText((12,)), 4)]


async def test_media_rows_travel_with_the_prompt() -> None:
    rows = np.ones((4, 8), np.float32)
    asked = PromptChunk(0, (1, 2), ((1, 4, 6, 1.0),), rows=4, limit=9)
    (prompt,) = [item async for item in talker_inputs(REQUEST, stream([asked, LatentChunk(0, rows)]))]
    assert isinstance(prompt, TalkerPrompt)
    assert prompt.media_rows is rows
    assert prompt.grids == (Grid(1, 4, 6, 1.0),)


async def test_the_token_that_hits_max_tokens_is_not_spoken() -> None:
    """Lag one: upstream drops the last generated token, which is the stop token (in no chunk) or this one."""
    assert await spoken([PROMPT, *words(10, 11, 12, 13, 14, 15)]) == [10, 11, 12, 13, 14]
    assert await spoken([PROMPT, TextChunk(0, "xy", (10, 11)), TextChunk(2, "abcd", (12, 13, 14, 15))]) == [
        *range(10, 15)
    ]
    assert await spoken([PROMPT, *words(10, 11, 12, 13, 14)]) == [10, 11, 12, 13, 14]  # the sixth was a stop token
    assert await spoken([PromptChunk(0, (1,)), *words(10, 11)]) == [10, 11]  # an engine that knows no limit


@pytest.mark.parametrize("limit", [1, 2])
async def test_tiny_max_tokens(limit: int) -> None:
    """C52: one token is text without speech."""
    chunks = [PromptChunk(0, (1,), limit=limit), *words(*range(10, 10 + limit))]
    assert await spoken(chunks) == list(range(10, 9 + limit))


async def test_an_answer_that_ends_at_once_is_a_prompt_without_text() -> None:
    assert await spoken([PROMPT]) == []


async def test_markup_and_tool_calls_are_not_spoken() -> None:
    """C40. They still count as tokens: what hits ``max_tokens`` is found by position."""
    marks = PromptChunk(0, (1,), limit=9, silent=frozenset({90, 91}), silent_spans=((80, 81), (82, 83)))
    answer = words(10, 90, 80, 11, 81, 12, 91, 13, 14)
    assert await spoken([marks, *answer]) == [10, 12, 13]
    assert await spoken([marks, *words(80, 11, 12)]) == []  # a tool call that is never closed
    assert await spoken([marks, *words(82, 80, 11, 81, 83, 12)]) == [12]
    assert await spoken([marks, *words(81, 10)]) == [81, 10]


async def test_text_before_the_prompt_is_a_failure() -> None:
    for chunks in (words(10), [PromptChunk(0, (1,), rows=2), *words(10)]):
        with pytest.raises(StageFailedError, match="before the prompt"):
            await spoken(list(chunks))
    with pytest.raises(StageFailedError, match="1 hidden rows arrived for 2"):
        await spoken([PromptChunk(0, (1,), rows=2), LatentChunk(0, np.zeros((1, 4), np.float32))])


async def test_code_frames_pass_unchanged() -> None:
    frames = CodeFrameChunk(0, np.zeros((2, 4), np.int64))
    got = [chunk async for chunk in frames_of_talker(REQUEST, stream([frames, TextChunk(0, "x")]))]
    assert got == [frames]
