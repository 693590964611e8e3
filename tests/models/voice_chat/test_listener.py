"""Whisper tiny.en with real weights on speech made by hibari."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
import soxr
from numpy.typing import NDArray

from omni_ray.config.pipeline import Edge, StageExecutionType, StagePipelineConfig
from omni_ray.engine.base import EngineContext
from omni_ray.engine.per_request import PerRequestEngine
from omni_ray.engine.types import AudioClip, Finish, Output, Request, TranscriptChunk
from omni_ray.models.voice_chat.listener import WhisperListener
from omni_ray.models.voice_chat.options import ListenerOptions

pytestmark = pytest.mark.weights

QUESTION = "What is the capital of France?"
SENTENCES = (
    "Good morning, everyone.",
    "The quick brown fox jumps over the lazy dog.",
    "I would like to order a bottle of water.",
    "Please turn off the lights in the kitchen.",
)

Samples = NDArray[np.float32]


@pytest.fixture(scope="session")
def speech() -> dict[str, Samples]:
    from hibari import Hibari

    voice = Hibari()
    return {text: soxr.resample(voice(text, seed=0), 24_000, 16_000) for text in (QUESTION, *SENTENCES)}


@pytest.fixture(scope="session")
def listener() -> WhisperListener:
    model = WhisperListener(context())
    model.load()
    return model


def context(**options: Any) -> EngineContext:
    edge = Edge(source="request", processor="a:b", parts=("input_audio",))
    stage = StagePipelineConfig(
        name="listener", execution_type=StageExecutionType.LLM_AR, model_arch="WhisperListener", inputs=(edge,)
    )
    return EngineContext(stage, None, WhisperListener, ListenerOptions(**options))


@pytest.fixture
def engine(listener: WhisperListener, monkeypatch: pytest.MonkeyPatch) -> PerRequestEngine:
    made = PerRequestEngine(context())
    monkeypatch.setattr(made, "_model", listener)
    return made


async def clips(*samples: Samples) -> AsyncIterator[AudioClip]:
    for index, each in enumerate(samples):
        yield AudioClip(index, each, 16000)


def listen(engine: PerRequestEngine, *samples: Samples) -> Any:
    return engine.generate(Request("r", 1), {"request": clips(*samples)})


async def collect(engine: PerRequestEngine, *samples: Samples) -> tuple[list[TranscriptChunk], Finish]:
    outputs: list[Output] = [output async for output in listen(engine, *samples)]
    finish = outputs.pop()
    assert isinstance(finish, Finish)
    segments = [output for output in outputs if isinstance(output, TranscriptChunk)]
    assert len(segments) == len(outputs)
    assert [segment.position for segment in segments] == list(range(len(segments)))
    return segments, finish


def text_of(segments: list[TranscriptChunk]) -> str:
    return " ".join(segment.text for segment in segments)


async def test_a_question(engine: PerRequestEngine, speech: dict[str, Samples]) -> None:
    segments, finish = await collect(engine, speech[QUESTION])
    assert text_of(segments) == QUESTION
    assert finish.reason == "stop"
    assert finish.usage.prompt_tokens == -(-len(speech[QUESTION]) // 320)
    assert finish.usage.completion_tokens == 7


async def test_two_clips_keep_their_numbers(engine: PerRequestEngine, speech: dict[str, Samples]) -> None:
    segments, _ = await collect(engine, speech[QUESTION], speech[SENTENCES[0]])
    assert [(segment.clip, segment.text) for segment in segments] == [(0, QUESTION), (1, SENTENCES[0])]


async def test_long_clip_loses_nothing(engine: PerRequestEngine, speech: dict[str, Samples]) -> None:
    """cases.md C32: three windows of 30 s, a sentence at each border and one at the very end."""
    samples = np.zeros(61 * 16000, np.float32)
    for start_s, text in zip((1, 28.5, 45, 58), SENTENCES, strict=True):
        start = int(start_s * 16000)
        samples[start : start + len(speech[text])] = speech[text][: len(samples) - start]
    segments, _ = await collect(engine, samples)
    heard = text_of(segments).lower()
    for word in ("morning", "fox", "dog", "bottle", "water", "lights", "kitchen"):
        assert word in heard
    assert [segment.start_s for segment in segments] == sorted(segment.start_s for segment in segments)
    assert segments[-1].end_s > 58


@pytest.mark.parametrize("size", [0, 1, 160, 32000])
async def test_silence_is_an_empty_transcript(engine: PerRequestEngine, size: int) -> None:
    segments, finish = await collect(engine, np.zeros(size, np.float32))
    assert text_of(segments) == ""
    assert finish.usage.completion_tokens == 0


async def test_noise_is_legal(engine: PerRequestEngine) -> None:
    noise = np.random.default_rng(0).normal(0, 0.05, 48000).astype(np.float32)
    _, finish = await collect(engine, noise)
    assert finish.usage.prompt_tokens == 150


async def test_cancelling_between_segments(engine: PerRequestEngine, speech: dict[str, Samples]) -> None:
    pause = np.zeros(16000, np.float32)
    samples = np.concatenate([part for text in SENTENCES * 4 for part in (speech[text], pause)])
    async with aclosing(listen(engine, samples)) as outputs:
        first = await anext(outputs)
    assert isinstance(first, TranscriptChunk)
    assert first.end_s < 30
    stats = engine.stats()
    assert (stats.running, stats.queued) == (0, 0)
    await engine.check_health()


async def test_short_window_hears_the_same_words(engine: PerRequestEngine, speech: dict[str, Samples]) -> None:
    full = WhisperListener(context(context_s=30))
    full.load()
    for text, samples in speech.items():
        short, _ = await collect(engine, samples)
        whole = " ".join(segment.text.strip() for segment in full._segments(samples))
        assert text_of(short).rstrip(".?") == whole.rstrip(".?"), text
