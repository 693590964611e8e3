"""The codec engine with toy codecs: exact streams, chunk sizes, and whose failure is whose."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from omni_ray.config.pipeline import Edge, StageExecutionType, StagePipelineConfig
from omni_ray.engine import admission
from omni_ray.engine.base import EngineContext
from omni_ray.engine.codec import Codec, CodecEngine, DecodeItem, WindowCodec
from omni_ray.engine.options import CodecOptions
from omni_ray.engine.rechunk import array_of
from omni_ray.engine.types import AudioChunk, CodeFrameChunk, Finish, LatentChunk, Output, Request
from omni_ray.errors import ConfigError, NonFiniteAudioError, SaturatedError, StageFailedError
from tests.clock import a_moment, put_clock

U = 8


def context(model_cls: Callable[[EngineContext], Any], **options: Any) -> EngineContext:
    stage = StagePipelineConfig(
        name="code2wav",
        execution_type=StageExecutionType.LLM_GENERATION,
        model_arch="Toy",
        inputs=(Edge(source="request", processor="x:y", parts=("speech_text",)),),
    )
    return EngineContext(stage, None, model_cls, CodecOptions(**options))  # type: ignore[arg-type]


def window_codec(
    left: int = 0, right: int = 0, deficit: int = 0, channels: int = 1, real_left: int | None = None
) -> type[WindowCodec]:
    """A decoder whose sample depends on ``real_left`` frames before its own and ``right`` after, zeros beyond."""
    reach = left if real_left is None else real_left

    class Toy(WindowCodec):
        sample_rate = 1000
        samples_per_frame = U
        min_left_context = left
        right_context = right

        def load(self) -> None:
            pass

        def decode_windows(self, windows: Sequence[NDArray[np.int64]]) -> list[NDArray[np.float32]]:
            return [self.one(window) for window in windows]

        def one(self, window: NDArray[np.int64]) -> NDArray[np.float32]:
            padded = np.concatenate([np.zeros(reach), window[:, 0], np.zeros(right)])
            mixed = [padded[i : i + len(window)] * (1 + i) for i in range(reach + 1 + right)]
            out = (np.sum(mixed, axis=0)[:, None] * 100 + np.arange(U)).reshape(-1).astype(np.float32)
            out = out[: max(0, len(out) - deficit)]
            return np.stack([out, -out], axis=1) if channels == 2 else out

    Toy.channels = channels
    return Toy


def frames(count: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(1, 50, (count, 2))


async def pieces(array: NDArray[np.int64], size: int = 1) -> AsyncIterator[CodeFrameChunk]:
    for start in range(0, len(array), size):
        yield CodeFrameChunk(start, array[start : start + size])


async def collect(
    engine: CodecEngine, inputs: AsyncIterator[Any], request_id: str = "r", **fields: Any
) -> list[Output]:
    return [o async for o in engine.generate(Request(request_id, seed=1, **fields), {"talker": inputs})]


def sound(outputs: Iterable[Output]) -> NDArray[np.float32]:
    chunks = [o for o in outputs if isinstance(o, AudioChunk)]
    end = 0
    for chunk in chunks:
        assert chunk.position == end
        assert len(chunk.samples) > 0
        end += len(chunk.samples)
    return np.concatenate([chunk.samples for chunk in chunks]) if chunks else np.zeros(0, np.float32)


@pytest.mark.parametrize(
    ("left", "right", "deficit", "channels"),
    [(0, 0, 0, 1), (0, 0, 5, 1), (5, 0, 0, 1), (5, 0, 13, 1), (0, 3, 0, 1), (5, 3, 0, 2), (5, 3, 5, 1), (27, 2, 21, 2)],
)
async def test_stream_equals_one_call_for_every_length(left: int, right: int, deficit: int, channels: int) -> None:
    cls = window_codec(left, right, deficit, channels)
    engines = [CodecEngine(context(cls, chunk_frames=k)) for k in [(1,), (10,), (2, 3, 7)]]
    for count in range(1, 41):
        array = frames(count, count)
        expected = cls(context(cls)).one(array)  # type: ignore[attr-defined]
        for engine, size in zip(engines, (1, 3, 40), strict=True):
            outputs = await collect(engine, pieces(array, size))
            assert np.array_equal(sound(outputs).reshape(expected.shape), expected), (count, size)
            finish = outputs[-1]
            assert isinstance(finish, Finish)
            assert (finish.reason, finish.usage.audio_tokens) == ("stop", count)
    for engine in engines:
        assert engine.stats().running == 0
        await engine.stop()


async def test_c20_too_little_left_context_is_refused_and_enough_is_exact() -> None:
    cls = window_codec(left=27)
    with pytest.raises(ConfigError, match=r"stage 'code2wav', engine\.left_context: 8 is below 27"):
        CodecEngine(context(cls, left_context=8))
    array = frames(90)
    expected = cls(context(cls)).one(array)  # type: ignore[attr-defined]
    for chosen in (27, 40, None):
        engine = CodecEngine(context(cls, left_context=chosen, chunk_frames=(10,)))
        assert np.array_equal(sound(await collect(engine, pieces(array))), expected)
    liar = window_codec(left=8, real_left=27)  # the toy does see its context: with less, the sound is wrong
    engine = CodecEngine(context(liar, chunk_frames=(10,)))
    assert not np.array_equal(sound(await collect(engine, pieces(array))), expected)


@dataclass(slots=True)
class Seen:
    """State of the recording codec: what one request was given."""

    name: str
    calls: list[tuple[int, int, bool, bool]]


class Recorder(Codec):
    """One sample per unit, and tail of 2 samples at the end; keeps what it was asked, and fails as told."""

    sample_rate = 1000
    streaming = "state"

    def __init__(self, made: EngineContext) -> None:
        super().__init__(made)
        self.seen: dict[str, Seen] = {}
        self.closed: list[str] = []
        self.batches: list[int] = []
        self.threads: set[str] = set()
        self.hold: threading.Event | None = None
        self.started = threading.Event()

    def load(self) -> None:
        self.threads.add(threading.current_thread().name)

    def open(self, request: Request) -> Seen:
        return self.seen.setdefault(request.request_id, Seen(request.request_id, []))

    def close(self, state: Seen) -> None:
        self.closed.append(state.name)

    def decode(self, items: Sequence[DecodeItem]) -> list[NDArray[np.float32]]:
        self.threads.add(threading.current_thread().name)
        self.batches.append(len(items))
        self.started.set()
        if self.hold is not None:
            assert self.hold.wait(30)
        for item in items:
            if item.state.name == "bad" and len(item.state.calls) == 1:
                raise ValueError("the bad one")
        outputs = []
        for item in items:
            unit = item.units
            ends = isinstance(unit, LatentChunk) and unit.ends_segment
            item.state.calls.append((unit.position, len(array_of(unit)), ends, item.last))
            out = np.ones(len(array_of(unit)) + 2 * item.last, np.float32)
            if item.state.name == "nan" and len(item.state.calls) == 2:
                out[0] = np.nan
            outputs.append(out)
        return outputs


def recorder(cls: type[Recorder] = Recorder, **options: Any) -> tuple[CodecEngine, Recorder]:
    engine = CodecEngine(context(cls, **options))
    codec = engine._codec
    assert isinstance(codec, Recorder)
    return engine, codec


async def test_c75_every_request_has_its_own_schedule_whatever_runs_beside_it() -> None:
    engine, codec = recorder(chunk_frames=(4, 8, 16))
    await engine.start()
    sizes = {"a": 1, "b": 5, "c": 7, "d": 100}
    await asyncio.gather(*(collect(engine, pieces(frames(50), size), name) for name, size in sizes.items()))
    for name in sizes:
        calls = [(0, 4), (4, 8), (12, 16), (28, 16), (44, 6)]
        assert codec.seen[name].calls == [(*c, False, i == 4) for i, c in enumerate(calls)]
    assert max(codec.batches) > 1
    assert len(codec.threads) == 1
    await engine.stop()


async def test_a_chunk_is_no_longer_than_the_lead_where_that_is_asked_for() -> None:
    """A second per frame, all at once: each chunk must last no longer than what was given out before it."""

    class Slow(Recorder):
        sample_rate = 1

    engine, codec = recorder(Slow, chunk_frames=(4, 8, 16), chunk_growth="lead")
    await engine.start()
    outputs = await collect(engine, pieces(frames(50), 50))
    assert [count for _, count, _, _ in codec.seen["r"].calls] == [4, 4, 4, 8, 16, 14]
    assert len(sound(outputs)) == 52
    await engine.stop()


async def test_the_tail_comes_once_also_when_the_stream_ends_on_a_border() -> None:
    engine, codec = recorder(chunk_frames=(4,))
    outputs = await collect(engine, pieces(frames(8)))
    assert codec.seen["r"].calls == [(0, 4, False, False), (4, 4, False, False), (8, 0, False, True)]
    assert len(sound(outputs)) == 10
    engine, codec = recorder(chunk_frames=(4,))
    outputs = await collect(engine, pieces(frames(0)))
    assert [type(o) for o in outputs] == [Finish]
    assert codec.seen["r"].calls == []


async def latents(*spec: tuple[int, int, bool]) -> AsyncIterator[LatentChunk]:
    position = 0
    for rows, segment, ends in spec:
        yield LatentChunk(position, np.zeros((rows, 3), np.float32), segment, ends)
        position += rows


async def test_a_chunk_never_spans_a_segment_end() -> None:
    engine, codec = recorder(chunk_frames=(4, 8))
    await collect(
        engine, latents((3, 0, False), (8, 0, True), (4, 1, False), (4, 1, True), (2, 2, False), (0, 2, True))
    )
    assert codec.seen["r"].calls == [
        (0, 4, False, False),
        (4, 7, True, False),
        (11, 8, True, False),
        (19, 2, True, False),
        (21, 0, False, True),
    ]
    engine, codec = recorder(chunk_frames=(4,))
    await collect(engine, latents((5, 0, False)))  # the talker was cut: the end closes the segment
    assert codec.seen["r"].calls == [(0, 4, False, False), (4, 1, True, True)]


async def test_a_codec_that_can_not_stream_gets_everything_in_one_call() -> None:
    class Whole(Recorder):
        streaming = "whole"  # type: ignore[assignment]

    engine, codec = recorder(Whole, chunk_frames=(4,))
    await collect(engine, pieces(frames(50), 3))
    assert codec.seen["r"].calls == [(0, 50, False, True)]
    await collect(engine, latents((3, 0, False), (8, 0, True), (4, 1, True)), "l")
    assert codec.seen["l"].calls == [(0, 11, True, False), (11, 4, True, False), (15, 0, False, True)]


@pytest.mark.parametrize(
    "second",
    [LatentChunk(4, np.zeros((1, 3), np.float32)), LatentChunk(5, np.zeros((1, 3), np.float32), segment=1)],
    ids=["gap", "segment"],
)
async def test_inputs_that_do_not_follow_each_other_are_refused(second: LatentChunk) -> None:
    async def broken() -> AsyncIterator[LatentChunk]:
        yield LatentChunk(0, np.zeros((5, 3), np.float32))
        yield second

    engine, _ = recorder(chunk_frames=(50,))
    with pytest.raises(StageFailedError, match=r"instead of 5|before segment 0 ended"):
        await collect(engine, broken())


@pytest.mark.parametrize(("guilty", "error"), [("bad", ValueError), ("nan", NonFiniteAudioError)])
async def test_only_the_guilty_request_fails(guilty: str, error: type[Exception]) -> None:
    engine, codec = recorder(chunk_frames=(4,))
    names = ["a", guilty, "b", "c"]
    results = await asyncio.gather(*(collect(engine, pieces(frames(12)), n) for n in names), return_exceptions=True)
    for name, result in zip(names, results, strict=True):
        if name == guilty:
            assert type(result) is error
        else:
            assert isinstance(result, list)
            assert len(sound(result)) == 14
    assert max(codec.batches) > 1
    assert engine.stats().running == 0
    await engine._batches.run(lambda: None)  # whatever is to be closed is closed before this
    await engine.stop()
    assert sorted(codec.closed) == sorted(names)


async def test_a_wrong_number_of_outputs_is_never_broadcast() -> None:
    class One(Recorder):
        def decode(self, items: Sequence[DecodeItem]) -> list[NDArray[np.float32]]:
            return super().decode(items)[:1]

    engine, codec = recorder(One, chunk_frames=(4,))
    results = await asyncio.gather(*(collect(engine, pieces(frames(12)), n) for n in "abc"), return_exceptions=True)
    assert [type(r) for r in results] == [StageFailedError] * 3
    assert "3 gave 1 outputs" in str(results[0])
    assert codec.batches == [3]  # not tried again one by one
    assert isinstance(await collect(engine, pieces(frames(12))), list)

    class OneWindow(window_codec()):  # type: ignore[misc]
        def decode_windows(self, windows: Sequence[NDArray[np.int64]]) -> list[NDArray[np.float32]]:
            return [self.one(windows[0])]

    engine = CodecEngine(context(OneWindow, chunk_frames=(4,)))
    results = await asyncio.gather(*(collect(engine, pieces(frames(12)), n) for n in "ab"), return_exceptions=True)
    assert [type(r) for r in results] == [StageFailedError] * 2


async def test_wrong_shapes_and_too_long_windows_fail() -> None:
    class Stereo(Recorder):
        channels = 2

    class Long(window_codec()):  # type: ignore[misc]
        def one(self, window: NDArray[np.int64]) -> NDArray[np.float32]:
            return np.zeros(len(window) * U + 1, np.float32)

    for cls in (Stereo, Long):
        with pytest.raises(StageFailedError, match="samples"):
            await collect(CodecEngine(context(cls, chunk_frames=(4,))), pieces(frames(9)))


async def test_cancelled_in_mid_step_drops_out_and_is_never_flushed() -> None:
    engine, codec = recorder(chunk_frames=(4,))
    codec.hold = threading.Event()
    closed = asyncio.Event()

    async def endless() -> AsyncIterator[CodeFrameChunk]:
        try:
            for start in range(0, 10**6, 4):
                yield CodeFrameChunk(start, np.ones((4, 1), np.int64))
        finally:
            closed.set()

    gone = asyncio.create_task(collect(engine, endless(), "gone"))
    assert await asyncio.to_thread(codec.started.wait, 30)
    late = asyncio.create_task(collect(engine, endless(), "late"))  # cancelled before its first step
    other = asyncio.create_task(collect(engine, pieces(frames(12)), "other"))
    await a_moment()
    assert engine.stats().running == 3
    gone.cancel()
    late.cancel()
    await asyncio.gather(gone, late, return_exceptions=True)
    assert closed.is_set()
    assert engine.stats().running == 1
    codec.hold.set()
    assert len(sound(await other)) == 14
    assert codec.seen["gone"].calls == [(0, 4, False, False)]
    assert codec.seen["late"].calls == []
    assert codec.batches[:2] == [1, 1]
    await engine._batches.run(lambda: None)  # whatever is to be closed is closed before this
    await engine.stop()
    assert sorted(codec.closed) == ["gone", "late", "other"]


async def test_an_upstream_error_passes_through_without_a_flush() -> None:
    async def failing() -> AsyncIterator[CodeFrameChunk]:
        yield CodeFrameChunk(0, frames(6))
        raise StageFailedError("talker failed")

    engine, codec = recorder(chunk_frames=(4,))
    with pytest.raises(StageFailedError, match="talker failed"):
        await collect(engine, failing())
    assert codec.seen["r"].calls == [(0, 4, False, False)]
    assert engine.stats().running == 0


async def test_the_length_limit_cuts_exactly_and_closes_the_input() -> None:
    closed = False

    async def endless() -> AsyncIterator[CodeFrameChunk]:
        nonlocal closed
        try:
            for start in range(10**6):
                yield CodeFrameChunk(start, np.ones((1, 1), np.int64))
        finally:
            closed = True

    engine, _ = recorder(chunk_frames=(4,))
    outputs = []
    async for output in engine.generate(Request("r", seed=1, max_audio_seconds=0.01), {"talker": endless()}):
        outputs.append(output)
        assert closed == isinstance(output, Finish)
    assert [len(o.samples) for o in outputs if isinstance(o, AudioChunk)] == [4, 4, 2]
    finish = outputs[-1]
    assert isinstance(finish, Finish)
    assert (finish.reason, finish.usage.audio_tokens) == ("length", 12)
    exact = await collect(engine, pieces(frames(8)), max_audio_seconds=0.01)  # 8 and a tail of 2: not too long
    assert (len(sound(exact)), exact[-1].reason) == (10, "stop")  # type: ignore[union-attr]


async def test_a_full_engine_refuses_before_it_reads_and_stop_fails_what_runs() -> None:
    engine, codec = recorder(chunk_frames=(4,), max_num_seqs=1, max_queue=0)
    codec.hold = threading.Event()
    running = asyncio.create_task(collect(engine, pieces(frames(12))))
    assert await asyncio.to_thread(codec.started.wait, 30)
    with pytest.raises(SaturatedError):
        await collect(engine, pieces(frames(12)), "second")
    assert "second" not in codec.seen
    await engine.check_health()
    await engine.stop()
    codec.hold.set()
    with pytest.raises(StageFailedError, match="stopped"):
        await running
    assert engine.stats().running == 0


async def test_a_hung_decoder_fails_the_health_check_but_an_idle_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = put_clock(monkeypatch, admission)
    engine, codec = recorder(chunk_frames=(4,), stall_s=60)
    clock.pass_by(90)
    await engine.check_health()
    codec.hold = threading.Event()
    running = asyncio.create_task(collect(engine, pieces(frames(4))))
    assert await asyncio.to_thread(codec.started.wait, 30)
    clock.pass_by(90)
    with pytest.raises(StageFailedError, match="hangs"):
        await engine.check_health()
    codec.hold.set()
    await running
    await engine.check_health()
    await engine.stop()
