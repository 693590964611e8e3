"""The generator engine: one upstream generator per request, isolated from all others, closed however it ends."""

import asyncio
import random
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omni_ray.config.pipeline import Edge, StagePipelineConfig
from omni_ray.engine import generator_run
from omni_ray.engine.base import EngineContext
from omni_ray.engine.generator import GeneratorEngine, GeneratorModel
from omni_ray.engine.generator_run import Job, Piece
from omni_ray.engine.options import GeneratorOptions
from omni_ray.engine.types import AudioChunk, Finish, Output, Request
from omni_ray.errors import NonFiniteAudioError, SaturatedError, StageFailedError
from tests.clock import put_clock

Speak = Callable[[Job], Iterator[Piece]]
RATE = 1000


def engine(speak: Speak, **options: Any) -> GeneratorEngine:
    class Model(GeneratorModel):
        sample_rate = RATE
        samples_per_token = 10

        def load(self) -> None:
            pass

        def speak(self, job: Job) -> Iterator[Piece]:
            return speak(job)

    stage = StagePipelineConfig(
        name="talker",
        execution_type="llm_ar",
        model_arch="Model",
        inputs=(Edge(source="request", processor="x:y", parts=("speech_text",)),),
    )
    given = GeneratorOptions.model_validate({"max_num_seqs": 4, **options})
    return GeneratorEngine(EngineContext(stage=stage, model=None, model_cls=Model, options=given))


def run(made: GeneratorEngine, name: str = "r", seed: int = 0, **fields: Any) -> Any:
    async def inputs() -> AsyncIterator[str]:
        yield name

    return made.generate(Request(name, seed=seed, **fields), {"request": inputs()})


async def collect(made: GeneratorEngine, *args: Any, **fields: Any) -> list[Output]:
    async with aclosing(run(made, *args, **fields)) as outputs:
        return [output async for output in outputs]


def sound(outputs: list[Output]) -> list[float]:
    chunks = [o for o in outputs if isinstance(o, AudioChunk)]
    assert [c.position for c in chunks] == [sum(len(c.samples) for c in chunks[:i]) for i in range(len(chunks))]
    return np.concatenate([c.samples for c in chunks] or [np.zeros(0, np.float32)]).tolist()


async def idle(made: GeneratorEngine) -> None:
    """Counters return to zero, soon."""
    for _ in range(2000):
        if made.stats().running == made.stats().queued == 0:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(made.stats())


def piece(*samples: float, whole: bool = False) -> Piece:
    return Piece(np.array(samples, np.float32), whole)


async def test_increments_then_the_whole_are_heard_once():
    made = engine(lambda job: iter([piece(0.1, 0.2), piece(0.3), piece(0.1, 0.2, 0.3, whole=True)]))
    outputs = await collect(made)
    assert sound(outputs) == pytest.approx([0.1, 0.2, 0.3])
    last = outputs[-1]
    assert isinstance(last, Finish)
    assert (last.reason, last.usage.audio_tokens) == ("stop", 1)


async def test_a_lone_whole_is_heard():
    assert sound(await collect(engine(lambda job: iter([piece(0.5, 0.25, whole=True)])))) == [0.5, 0.25]


async def test_stereo_is_averaged_not_interleaved():
    both = Piece(np.array([[1.0, 0.0], [0.0, 0.5]], np.float32))
    assert sound(await collect(engine(lambda job: iter([both])))) == [0.5, 0.25]


async def test_an_empty_increment_ends_the_request():
    """Whatever a model yields after its end marker is not for this request."""
    made = engine(lambda job: iter([piece(0.1), piece(), piece(0.9)]))
    assert sound(await collect(made)) == pytest.approx([0.1])


async def test_no_sound_at_all_is_an_answer():
    assert sound(await collect(engine(lambda job: iter([])))) == []


async def test_cut_at_max_audio_seconds():
    made = engine(lambda job: iter([piece(*[0.1] * 60), piece(*[0.2] * 60)]))
    outputs = await collect(made, max_audio_seconds=0.1)
    assert len(sound(outputs)) == 100
    assert isinstance(outputs[-1], Finish)
    assert outputs[-1].reason == "length"


async def test_nan_is_an_error():
    with pytest.raises(NonFiniteAudioError):
        await collect(engine(lambda job: iter([piece(0.1), piece(float("nan"))])))


def draws(job: Job) -> Iterator[Piece]:
    for _ in range(5):
        yield piece(random.random(), float(np.random.random()), float(torch.rand(1)))


async def test_randomness_is_the_requests_own():
    """Eight requests take turns step by step; each draws what it draws alone, and the process's state is untouched."""
    alone = [sound(await collect(engine(draws), f"r{seed}", seed)) for seed in range(4)]
    random.seed(99), np.random.seed(99), torch.manual_seed(99)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    made = engine(draws, max_num_seqs=8)
    together = await asyncio.gather(*(collect(made, f"r{i}", i % 4) for i in range(8)))
    assert [sound(outputs) for outputs in together] == [*alone, *alone]
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert len({tuple(s) for s in alone}) == 4


async def test_steps_never_overlap():
    inside = 0

    def speak(job: Job) -> Iterator[Piece]:
        nonlocal inside
        for _ in range(20):
            inside += 1
            assert inside == 1
            threading.Event().wait(0.001)
            inside -= 1
            yield piece(0.1)

    made = engine(speak)
    assert [len(sound(o)) for o in await asyncio.gather(*(collect(made, f"r{i}") for i in range(4)))] == [20] * 4


class Endless:
    """Speaks for ever and tells what became of it."""

    def __init__(self) -> None:
        self.closed: list[str] = []
        self.threads: dict[str, set[int]] = {}
        self.scratch: list[Path] = []
        self.steps = 0

    def __call__(self, job: Job) -> Iterator[Piece]:
        name = job.request.request_id
        self.scratch.append(job.scratch)
        mine = self.threads.setdefault(name, set())
        (job.scratch / "work.wav").write_bytes(b"x")
        try:
            while True:
                self.steps += 1
                mine.add(threading.get_ident())
                yield piece(0.1)
        finally:
            mine.add(threading.get_ident())
            self.closed.append(name)


async def test_cancel_closes_the_generator_on_its_own_thread():
    speak = Endless()
    made = engine(speak)
    stream = run(made)
    assert isinstance(await anext(stream), AudioChunk)
    assert speak.scratch[0].is_dir()
    await stream.aclose()
    await idle(made)
    assert speak.closed == ["r"]
    assert len(speak.threads["r"]) == 1
    assert not speak.scratch[0].exists()


async def test_a_slow_reader_bounds_what_is_made():
    speak = Endless()
    made = engine(speak, max_pieces=3)
    stream = run(made)
    await anext(stream)
    await asyncio.sleep(0.1)
    assert speak.steps <= 5
    await made.check_health()
    await stream.aclose()
    await idle(made)


async def test_an_error_is_its_own_requests_affair():
    def speak(job: Job) -> Iterator[Piece]:
        yield piece(0.1)
        if job.request.request_id == "bad":
            raise ValueError("broken")
        yield piece(0.2)

    made = engine(speak)
    bad, good = await asyncio.gather(collect(made, "bad"), collect(made, "good"), return_exceptions=True)
    assert isinstance(bad, ValueError)
    assert sound(good) == pytest.approx([0.1, 0.2])
    await idle(made)


async def test_a_place_is_free_only_when_the_generator_is_closed():
    """With shared decoder state a second generator must not start while the first one still cleans up."""
    release = threading.Event()

    def speak(job: Job) -> Iterator[Piece]:
        try:
            yield piece(0.1)
            yield piece(0.1)
        finally:
            release.wait(30)

    made = engine(speak, max_num_seqs=1, max_queue=0)
    stream = run(made, "first")
    await anext(stream)
    await stream.aclose()
    assert made.stats().running == 1
    with pytest.raises(SaturatedError):
        await collect(made, "second")
    release.set()
    await idle(made)
    assert len(sound(await collect(made, "third"))) == 2


async def test_a_generator_that_exits_ends_its_own_request_only():
    """``sys.exit`` in a checkpoint's code ended the event loop, and all requests with it."""

    def speak(job: Job) -> Iterator[Piece]:
        yield piece(0.5)
        if job.request.request_id == "exits":
            sys.exit(3)

    made = engine(speak)
    ends, other = await asyncio.gather(collect(made, "exits"), collect(made, "other"), return_exceptions=True)
    assert isinstance(ends, StageFailedError)
    assert sound(other) == [0.5]
    await idle(made)


async def test_a_step_past_its_deadline_fails_the_health_check(monkeypatch):
    clock, began, release = put_clock(monkeypatch, generator_run), threading.Event(), threading.Event()

    def speak(job: Job) -> Iterator[Piece]:
        yield piece(0.1)
        began.set()
        release.wait(30)

    made = engine(speak, stall_s=60)
    stream = run(made)
    await anext(stream)
    assert await asyncio.to_thread(began.wait, 30)
    await made.check_health()
    clock.pass_by(90)
    with pytest.raises(StageFailedError, match="one step has run for"):
        await made.check_health()
    await stream.aclose()  # impatience does not hide it
    with pytest.raises(StageFailedError):
        await made.check_health()
    release.set()
    await idle(made)
    await made.check_health()


async def test_stop_closes_every_generator():
    speak = Endless()
    made = engine(speak)
    streams = [run(made, f"r{i}") for i in range(3)]
    for stream in streams:
        await anext(stream)
    await made.stop()
    assert sorted(speak.closed) == ["r0", "r1", "r2"]
    assert not any(path.exists() for path in speak.scratch)
    for stream in streams:
        await stream.aclose()
    await idle(made)
