"""Codec LMs on the autoregressive engine: a toy whose frames tell what it was fed, and when it was asked."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from omni_ray.config.pipeline import Edge, StageExecutionType, StagePipelineConfig
from omni_ray.config.sampling import SamplingParams
from omni_ray.engine import admission
from omni_ray.engine.ar import AREngine, CodecLM
from omni_ray.engine.ar_model import PREFILL_CHUNK, FrameStep, Probe
from omni_ray.engine.base import EngineContext
from omni_ray.engine.batches import BatchLengthError
from omni_ray.engine.options import AROptions, CodecLMOptions
from omni_ray.engine.resume import Resume
from omni_ray.engine.torch_sampler import RowSampling, draw
from omni_ray.engine.types import CodeFrameChunk, Finish, Request
from omni_ray.errors import ConfigError, InvalidRequestError, StageFailedError
from tests.clock import a_moment, put_clock

PAD = 900
STOP = 999
LENGTH = 200


@dataclass(frozen=True)
class Ask:
    """A toy prompt of ``size`` positions; ``frames`` it makes before its stop code."""

    frames: int = 10**9
    size: int = 5
    broken: str = ""


@dataclass(frozen=True)
class Rows:
    """A prepared prompt that is no list of ids."""

    ask: Ask
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, piece: slice) -> "Rows":
        return Rows(self.ask, self.start + piece.start, self.start + piece.stop)


class Toy(CodecLM):
    """Frame k is (unit k, a draw); checks that slots and steps are used as promised."""

    latest: ClassVar["Toy"]
    frame_rate = 10.0
    unequal = False
    stopped = 0

    def load(self) -> None:
        Toy.latest = self
        self.prompts: dict[int, Rows] = {}
        self.computed: dict[int, int] = {}
        self.told: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.steps: dict[int, int] = {}
        self.batches: list[tuple[int, ...]] = []
        self.gate = threading.Semaphore(10**9)
        self.sampling = RowSampling.empty(32, torch.device("cpu"))

    def encode(self, prompt: Any) -> Rows:
        assert isinstance(prompt, Ask)
        return Rows(prompt, 0, prompt.size)

    def begin(self, slot: int, prompt: Any) -> int:
        assert slot not in self.prompts
        self.prompts[slot], self.computed[slot], self.told[slot], self.steps[slot] = prompt, 0, [], 0
        self.ended.discard(slot)
        return 0

    def release(self, slot: int) -> None:
        self.prompts.pop(slot, None)

    def stop(self) -> None:
        assert not self.prompts
        self.stopped += 1

    def probes(self) -> Sequence[Probe]:
        return [Probe(Ask(size=size), ([1, 2, 3, 4],)) for size in (3, 150, 7)]

    def prefill(self, slot: int, piece: Any, start: int) -> None:
        assert isinstance(piece, Rows)
        assert (piece.start, start) == (self.computed[slot], self.computed[slot])
        assert len(piece) <= PREFILL_CHUNK
        self.computed[slot] = piece.stop

    def sample_as(self, slot: int, request: Request) -> None:
        self.sampling.set(slot, request)

    def feed(self, slot: int, item: Any) -> int:
        if item == "broken":
            raise ValueError("broken item")
        self.told[slot].extend(item)
        return len(item)

    def end_feed(self, slot: int) -> None:
        self.ended.add(slot)

    def follow(self, slot: int, frames: Tensor, start: int) -> None:
        assert self.computed[slot] == self.prompts[slot].ask.size
        assert start == self.steps[slot]
        assert len(frames) <= PREFILL_CHUNK
        units = self.told[slot][start : start + len(frames)]
        assert len(units) == len(frames) or slot in self.ended
        assert frames[:, 0].tolist() == units + [PAD] * (len(frames) - len(units))
        self.steps[slot] += len(frames)

    def step(self, slots: Sequence[int], steps: Sequence[int]) -> FrameStep:
        assert list(slots) == sorted(set(slots))
        assert self.gate.acquire(timeout=60)
        self.batches.append(tuple(slots))
        units = []
        for slot, step in zip(slots, steps, strict=True):
            assert self.computed[slot] == self.prompts[slot].ask.size
            assert step == self.steps[slot]
            assert step < len(self.told[slot]) or slot in self.ended
            if self.prompts[slot].ask.broken == "step" and step == 2:
                raise RuntimeError(f"slot {slot} is broken")
            units.append(self.told[slot][step] if step < len(self.told[slot]) else PAD)
        rows = self.sampling.take(slice(slots[0], slots[-1] + 1))
        where = torch.tensor([dict(zip(slots, steps, strict=True)).get(s, 0) for s in range(slots[0], slots[-1] + 1)])
        drawn = draw(torch.zeros(len(where), 50), rows, where, 0, 50)[torch.tensor(slots) - slots[0]]
        asks = [self.prompts[slot].ask for slot in slots]
        for slot in slots:
            self.steps[slot] += 1
        return FrameStep(
            frames=torch.stack((torch.tensor(units), drawn), 1),
            ended=[step == ask.frames for ask, step in zip(asks, steps, strict=True)],
            finite=[not (ask.broken == "nan" and step == 2) for ask, step in zip(asks, steps, strict=True)],
            evidence=self._evidence(slots, units),
        )

    def _evidence(self, slots: Sequence[int], units: Sequence[int]) -> Tensor:
        crowd = len(slots) > 1 if self.unequal else False
        return torch.tensor(units)[:, None] + (1e-7 if crowd else 0.0) * torch.ones(len(slots), 1).double()


@pytest.fixture
async def start() -> AsyncIterator[Any]:
    engines: list[AREngine] = []

    async def make(model: type[CodecLM] = Toy, options: type[AROptions] = CodecLMOptions, **given: Any) -> AREngine:
        edge = Edge(source="request", processor="a:b", parts=("messages",))
        stage = StagePipelineConfig(
            name="talker", execution_type=StageExecutionType.LLM_AR, model_arch="Toy", inputs=(edge,)
        )
        merged = options(**{"max_num_seqs": 8, "max_model_len": LENGTH, **given})
        engines.append(AREngine(EngineContext(stage, None, model, merged)))
        await engines[-1].start()
        return engines[-1]

    yield make
    for engine in engines:
        await engine.stop()
        assert engine.stats().running == engine.stats().queued == 0


async def source(*items: Any) -> AsyncIterator[Any]:
    for item in items:
        yield item


class Pipe:
    """A source that is written to as the test goes; remembers that it was closed."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.closed = False

    async def read(self) -> AsyncIterator[Any]:
        try:
            while (item := await self.queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            self.closed = True


def run(
    engine: AREngine,
    items: AsyncIterator[Any],
    seed: int = 1,
    priority: int = 0,
    resume: Resume | None = None,
    **given: Any,
) -> Any:
    sampling = SamplingParams(**{"temperature": 0, **given})
    return engine.generate(Request("r", seed, priority=priority, sampling=sampling), {"thinker": items}, resume)


async def collect(outputs: AsyncIterator[Any]) -> tuple[list[int], list[int], Finish]:
    """Units, draws and the finish; checks positions on the way."""
    units, drawn = list[int](), list[int]()
    finish = None
    async for output in outputs:
        assert finish is None
        if isinstance(output, Finish):
            finish = output
            continue
        assert isinstance(output, CodeFrameChunk)
        assert output.position == len(units)
        assert output.frames.shape == (len(output.frames), 2)
        units.extend(output.frames[:, 0].tolist())
        drawn.extend(output.frames[:, 1].tolist())
    assert finish is not None
    assert finish.usage.audio_tokens == len(units)
    return units, drawn, finish


async def settled(condition: Any) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.002)
    raise AssertionError("not true within 20 s")


async def test_frames_then_stop(start: Any) -> None:
    engine = await start()
    units, _, finish = await collect(run(engine, source(Ask(frames=5), [1, 2], [3])))
    assert units == [1, 2, 3, PAD, PAD]
    assert finish.reason == "stop"


async def test_a_late_unit_is_waited_for_and_never_padded(start: Any) -> None:
    """The order of events decides, not time: no frame between two units, the others go on meanwhile."""
    engine = await start()
    toy, pipe = Toy.latest, Pipe()
    await pipe.queue.put(Ask(frames=4))
    outputs = run(engine, pipe.read())
    first = asyncio.create_task(anext(outputs))
    await settled(lambda: 0 in toy.prompts)
    units, _, _ = await collect(run(engine, source(Ask(frames=30), [7])))
    assert len(units) == 30
    assert set(toy.batches) == {(1,)}
    assert not first.done()
    await pipe.queue.put([11])
    assert (await first).frames[0, 0] == 11
    second = asyncio.create_task(anext(outputs))
    await asyncio.sleep(0.05)
    assert not second.done()
    assert toy.steps[0] == 1
    await pipe.queue.put([12])
    assert (await second).frames[0, 0] == 12
    await pipe.queue.put(None)
    rest = [output async for output in outputs]
    assert [int(chunk.frames[0, 0]) for chunk in rest[:-1]] == [PAD, PAD]


async def test_units_that_come_before_the_prompt_is_computed(start: Any) -> None:
    engine = await start(max_num_seqs=2)
    long = Ask(frames=3, size=3 * PREFILL_CHUNK // 2)
    units, _, _ = await collect(run(engine, source(long, [1], [2], [3])))
    assert units == [1, 2, 3]


async def test_nothing_to_say(start: Any) -> None:
    """A feed that ends without a unit: no step, an empty answer (cases.md C52)."""
    engine = await start()
    for items in ((Ask(),), (Ask(), [])):
        units, _, finish = await collect(run(engine, source(*items)))
        assert (units, finish.reason) == ([], "stop")
    assert Toy.latest.batches == []
    assert Toy.latest.prompts == {}


class Told(Toy):
    """Its prompt brings three units along, and takes long to encode."""

    encodes_apart = True
    thread = ""

    def encode(self, prompt: Any) -> Rows:
        Told.thread = threading.current_thread().name
        if prompt.broken == "prompt":
            raise InvalidRequestError("broken prompt", "input")
        return super().encode(prompt)

    def units(self, prompt: Any) -> int:
        assert isinstance(prompt, Rows)
        return 3

    def begin(self, slot: int, prompt: Any) -> int:
        super().begin(slot, prompt)
        self.told[slot] = [21, 22, 23]
        return 0


async def test_a_prompt_that_brings_its_units_along(start: Any) -> None:
    """No unit is fed: the row steps at once, and its text bounds it as a feed would."""
    engine = await start(Told, base_frames=2, frames_per_unit=1)
    pipe = Pipe()
    await pipe.queue.put(Ask())
    outputs = run(engine, pipe.read())
    early = [(await anext(outputs)).frames[0, 0] for _ in range(3)]
    assert early == [21, 22, 23]
    await pipe.queue.put(None)
    rest = [output async for output in outputs]
    assert [chunk.frames[0, 0] for chunk in rest[:-1]] == [PAD, PAD]
    assert rest[-1].reason == "length"
    units, _, finish = await collect(run(engine, source(Ask(frames=4))))
    assert (units, finish.reason) == ([21, 22, 23, PAD], "stop")
    assert Told.thread.startswith("encode-talker")
    with pytest.raises(InvalidRequestError, match="broken prompt"):
        await collect(run(engine, source(Ask(broken="prompt"))))


async def test_caps(start: Any) -> None:
    """cases.md C23: text length, max_tokens, max_audio_seconds and max_model_len all end a model that does not."""
    engine = await start(base_frames=10, frames_per_unit=4)
    units, _, finish = await collect(run(engine, source(Ask(), [1, 2, 3])))
    assert (len(units), finish.reason) == (10 + 4 * 3, "length")
    units, _, finish = await collect(run(engine, source(Ask(), [1, 2, 3]), max_tokens=2))
    assert (units, finish.reason) == ([1, 2], "length")
    request = Request("r", 1, max_audio_seconds=0.7)
    units, _, finish = await collect(engine.generate(request, {"t": source(Ask(), [1, 2, 3])}))
    assert (len(units), finish.reason) == (7, "length")
    units, _, finish = await collect(run(engine, source(Ask(size=LENGTH - 4), list(range(50)))))
    assert (units, finish.reason) == ([0, 1, 2, 3], "length")


async def test_a_cap_closes_the_source(start: Any) -> None:
    engine = await start()
    pipe = Pipe()
    for item in (Ask(), [1, 2, 3]):
        await pipe.queue.put(item)
    units, _, finish = await collect(run(engine, pipe.read(), max_tokens=3))
    assert (units, finish.reason, pipe.closed) == ([1, 2, 3], "length", True)


async def test_cancelling_while_it_waits_frees_the_slot(start: Any) -> None:
    engine = await start(max_num_seqs=1)
    pipe = Pipe()
    for item in (Ask(), [1]):
        await pipe.queue.put(item)
    outputs = run(engine, pipe.read())
    await anext(outputs)
    waiting = asyncio.create_task(anext(outputs))
    await asyncio.sleep(0.02)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert engine.stats().running == 0
    assert pipe.closed
    await settled(lambda: Toy.latest.prompts == {})
    assert (await collect(run(engine, source(Ask(frames=1), [5]))))[0] == [5]


@pytest.mark.parametrize(
    ("sent", "raised"), [(ValueError("upstream"), ValueError), (asyncio.CancelledError(), StageFailedError)]
)
async def test_a_failing_source_ends_the_row(start: Any, sent: BaseException, raised: type[Exception]) -> None:
    engine = await start()
    pipe = Pipe()
    for item in (Ask(), [1], sent):
        await pipe.queue.put(item)
    with pytest.raises(raised):
        await collect(run(engine, pipe.read()))
    await settled(lambda: Toy.latest.prompts == {})
    await engine.check_health()


async def test_a_source_without_a_prompt(start: Any) -> None:
    engine = await start()
    with pytest.raises(StageFailedError, match="no prompt"):
        await collect(run(engine, source()))


async def test_a_prompt_that_does_not_fit(start: Any) -> None:
    engine = await start()
    with pytest.raises(InvalidRequestError):
        await collect(run(engine, source(Ask(size=LENGTH), [1])))
    assert (await collect(run(engine, source(Ask(size=LENGTH - 1), [1]))))[0] == [1]


@pytest.mark.parametrize(("broken", "error"), [("step", RuntimeError), ("nan", StageFailedError), ("feed", ValueError)])
async def test_a_failing_row_fails_alone(start: Any, broken: str, error: type[Exception]) -> None:
    engine = await start()
    bad: list[Any] = [Ask(broken=broken), [1, 2, 3], *(["broken"] if broken == "feed" else [])]
    good = Ask(frames=6)
    got = await asyncio.gather(
        collect(run(engine, source(good, [1]))),
        collect(run(engine, source(*bad))),
        collect(run(engine, source(good, [2]))),
        return_exceptions=True,
    )
    assert [got[0][0][0], got[2][0][0]] == [1, 2]  # type: ignore[index]
    assert len(got[0][0]) == len(got[2][0]) == 6  # type: ignore[index]
    assert isinstance(got[1], error)
    assert Toy.latest.prompts == {}


async def test_a_waiting_row_is_no_hang_and_a_hung_step_is(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, engine = put_clock(monkeypatch, admission), await start(stall_s=60)
    pipe = Pipe()
    for item in (Ask(), [1]):
        await pipe.queue.put(item)
    outputs = run(engine, pipe.read())
    await anext(outputs)
    task = asyncio.create_task(anext(outputs))
    await a_moment()
    clock.pass_by(90)
    await engine.check_health()
    await pipe.queue.put([])  # an item that is worth nothing
    await a_moment()
    clock.pass_by(90)
    await engine.check_health()
    Toy.latest.gate = threading.Semaphore(0)
    await pipe.queue.put([2])
    await settled(lambda: len(engine._admission._calls) == 1)
    clock.pass_by(90)
    with pytest.raises(StageFailedError, match="hangs"):
        await engine.check_health()
    Toy.latest.gate.release(10**6)
    await task
    await a_moment()
    await engine.check_health()
    await outputs.aclose()


async def test_stop_fails_a_waiting_row(start: Any) -> None:
    engine = await start()
    pipe = Pipe()
    await pipe.queue.put(Ask())
    waiting = asyncio.create_task(collect(run(engine, pipe.read())))
    await settled(lambda: engine.stats().running == 1)
    await engine.stop()
    assert Toy.latest.stopped == 1
    with pytest.raises(StageFailedError, match="stopped"):
        await waiting


async def test_more_waiting_rows_than_slots_queue(start: Any) -> None:
    engine = await start(max_num_seqs=2)
    got = await asyncio.gather(*(collect(run(engine, source(Ask(frames=4), [i]))) for i in range(7)))
    assert [units[0] for units, _, _ in got] == list(range(7))


@pytest.mark.parametrize("deterministic", [False, True])
async def test_seeds_are_equal_alone_and_in_a_crowd(start: Any, deterministic: bool) -> None:
    engine = await start(max_num_seqs=17, deterministic=deterministic)
    ask = (Ask(frames=20), [1, 2, 3])
    alone = (await collect(run(engine, source(*ask), seed=7, temperature=1)))[1]
    crowd = await asyncio.gather(*(collect(run(engine, source(*ask), seed=seed, temperature=1)) for seed in range(17)))
    assert crowd[7][1] == alone
    assert len({tuple(drawn) for _, drawn, _ in crowd}) == 17


async def test_deterministic_mode_refuses_a_machine_that_is_not(start: Any) -> None:
    class Unequal(Toy):
        unequal = True

    with pytest.raises(ConfigError, match=r"deterministic.*1e-07 apart"):
        await start(Unequal, deterministic=True)
    engine = await start(Unequal)
    assert (await collect(run(engine, source(Ask(frames=1), [3]))))[0] == [3]


async def test_codec_models_need_codec_options(start: Any) -> None:
    with pytest.raises(ConfigError, match="CodecLMOptions"):
        await start(options=AROptions)


async def test_closing_early_closes_the_source(start: Any) -> None:
    engine = await start()
    pipe = Pipe()
    for item in (Ask(), [1, 2]):
        await pipe.queue.put(item)
    async with aclosing(run(engine, pipe.read())) as outputs:
        await anext(outputs)
    assert pipe.closed


class Diary(Toy):
    """Writes down what was computed: a piece of whose prompt, or a step of whom. Sizes of prompts are names."""

    frame_rate = 1.0  # so long that no pause of the machine lets a listener catch up

    def load(self) -> None:
        super().load()
        self.diary: list[str] = []

    def prefill(self, slot: int, piece: Any, start: int) -> None:
        super().prefill(slot, piece, start)
        self.diary.append(f"prompt {piece.ask.size}")

    def step(self, slots: Sequence[int], steps: Sequence[int]) -> FrameStep:
        self.diary.append(f"step {[self.prompts[slot].ask.size for slot in slots]}")
        return super().step(slots, steps)


class Slow(Diary):
    """Its frames are so short that every stream is behind its listener."""

    frame_rate = 1e9


async def diary_of(start: Any, model: type[Diary], *newcomers: tuple[int, int]) -> list[str]:
    """What is computed from the moment when a running stream meets ``newcomers`` of (size, priority)."""
    engine = await start(model=model, max_model_len=2000, max_num_seqs=8)
    toy: Any = Toy.latest
    toy.gate = threading.Semaphore(20)
    old = asyncio.create_task(collect(run(engine, source(Ask(frames=40, size=5), list(range(60))))))
    await settled(lambda: len(toy.diary) == 22)  # its prompt, 20 steps, and one that waits at the gate
    new = [
        asyncio.create_task(collect(run(engine, source(Ask(frames=2, size=size), [1, 2, 3]), priority=priority)))
        for size, priority in newcomers
    ]
    await settled(lambda: engine.stats().running == 1 + len(new))
    await a_moment()
    toy.gate.release(10**6)
    for task in (old, *new):
        assert (await task)[2].reason == "stop"
    return list(toy.diary[22:])


async def sizes_of(outputs: Any) -> tuple[list[int], list[int]]:
    """How many frames each chunk has, and all their units."""
    chunks = [output async for output in outputs if isinstance(output, CodeFrameChunk)]
    return [len(chunk.frames) for chunk in chunks], [unit for chunk in chunks for unit in chunk.frames[:, 0].tolist()]


async def test_frames_go_out_together_only_while_the_listener_has_far_more_in_hand(start: Any) -> None:
    """At ten frames a second: one by one up to 0.8 s, then an eighth of what went out, at most a second of sound."""
    ask, units = Ask(frames=150), list(range(150))
    engine = await start(max_num_seqs=1)
    sizes, heard = await sizes_of(run(engine, source(ask, units)))
    assert heard == units
    assert sizes[:8] == [1] * 8
    assert all(size == 1 or 8 * (size - 1) <= sum(sizes[:place]) for place, size in enumerate(sizes))
    assert max(sizes) in (10, 11)
    engine = await start(Slow, max_num_seqs=1)
    assert await sizes_of(run(engine, source(ask, units))) == ([1] * 150, units)


class BreaksLate(Toy):
    """Its frame 43 holds no numbers."""

    def step(self, slots: Sequence[int], steps: Sequence[int]) -> FrameStep:
        return replace(super().step(slots, steps), finite=[step != 43 for step in steps])


@pytest.mark.parametrize("model", [Toy, BreaksLate])
async def test_frames_that_were_held_go_out_before_the_row_waits_or_fails(start: Any, model: type[Toy]) -> None:
    engine, pipe, count = await start(model), Pipe(), 0
    for item in (Ask(), list(range(50))):
        await pipe.queue.put(item)
    outputs = run(engine, pipe.read())
    expected = 43 if model is BreaksLate else 50
    while count < expected:
        count += len((await asyncio.wait_for(anext(outputs), 5)).frames)
    assert count == expected
    if model is BreaksLate:
        with pytest.raises(StageFailedError, match="NaN"):
            await anext(outputs)
    await outputs.aclose()


async def test_while_all_are_ahead_of_their_listeners_prompts_go_first(start: Any) -> None:
    """Nobody has heard a newcomer; a stream two seconds ahead can wait. Work goes on all the time, only its order."""
    diary = await diary_of(start, Diary, (400, 0))
    assert diary[:5] == ["prompt 400"] * 4 + ["step [5, 400]"]


async def test_a_stream_behind_its_listener_is_not_held_up_by_prompts(start: Any) -> None:
    diary = await diary_of(start, Slow, (400, 0))
    assert diary[:8] == ["prompt 400", "step [5]"] * 3 + ["prompt 400", "step [5, 400]"]


async def test_prompts_of_chat_go_before_those_of_batch_work(start: Any) -> None:
    diary = await diary_of(start, Diary, (300, 2), (400, 2), (500, 0))
    prompts = [entry for entry in diary if entry.startswith("prompt")]
    assert prompts == ["prompt 500"] * 4 + ["prompt 300"] * 3 + ["prompt 400"] * 4


class TestResume:
    """A request goes on where another replica died: its frames at once, then the ones that were still to come."""

    async def made(self, outputs: AsyncIterator[Any]) -> tuple[np.ndarray, Finish]:
        frames, finish = [], None
        async for output in outputs:
            if isinstance(output, CodeFrameChunk):
                assert output.position == sum(map(len, frames))
                frames.append(output.frames)
            else:
                finish = output
        assert isinstance(finish, Finish)
        return np.concatenate(frames), finish

    @pytest.mark.parametrize("deterministic", [False, True])
    @pytest.mark.parametrize("known", [1, 7, 140, 150])
    async def test_goes_on_behind_its_record(self, start: Any, known: int, deterministic: bool) -> None:
        engine = await start(deterministic=deterministic, base_frames=200, max_model_len=400)
        how = {"temperature": 1.0, "top_k": 20, "seed": 5}
        feed = [Ask(frames=150), [1, 2, 3], list(range(10, 100)), [7]]
        frames, finish = await self.made(run(engine, source(*feed), **how))
        Toy.latest.batches.clear()
        resume = Resume(frames=frames[:known])
        again, ended = await self.made(run(engine, source(*feed), resume=resume, **how))
        assert np.array_equal(again, frames)
        assert ended == finish
        assert len(Toy.latest.batches) == 151 - (0 if deterministic else known)

    async def test_its_frames_come_before_its_text(self, start: Any) -> None:
        """The codec behind it can rebuild its state while the talker still waits for what it is to speak."""
        engine, pipe = await start(), Pipe()
        outputs = run(engine, pipe.read(), resume=Resume(frames=np.array([[1, 0], [2, 0]])))
        async with aclosing(outputs), asyncio.timeout(30):
            first = await anext(outputs)
            assert first.frames.tolist() == [[1, 0], [2, 0]]
            for item in (Ask(frames=3), [1], [2, 3]):
                await pipe.queue.put(item)
            assert (await anext(outputs)).position == 2

    async def test_an_answer_that_had_ended_asks_for_nothing(self, start: Any) -> None:
        engine, pipe = await start(), Pipe()
        frames, end = np.array([[1, 0], [2, 0]]), Finish("length")
        outputs = run(engine, pipe.read(), resume=Resume(frames=frames, finish=end))
        again, finish = await self.made(outputs)
        assert np.array_equal(again, frames)
        assert finish == end
        assert not Toy.latest.batches


def one_short(made: FrameStep) -> FrameStep:
    """In company one frame too few: whose is missing, nobody can tell."""
    keep = max(1, len(made.frames) - 1)
    return FrameStep(made.frames[:keep], made.ended[:keep], made.finite[:keep], made.evidence[:keep])


class Short(Toy):
    def step(self, slots: Sequence[int], steps: Sequence[int]) -> FrameStep:
        return one_short(super().step(slots, steps))


class ShortAhead(Toy):
    """The same, read one step late."""

    ahead = True

    def launch(self, slots: Sequence[int], steps: Sequence[int]) -> Callable[[], FrameStep]:
        made = one_short(self.step(slots, steps))
        return lambda: made


@pytest.mark.parametrize("model", [Short, ShortAhead])
async def test_a_wrong_number_of_frames_is_never_handed_out(start: Any, model: type[Toy]) -> None:
    """C01: the rows of that step fail, all of them, and the engine goes on; a short list once stopped it for good."""
    engine = await start(model=model)
    toy: Any = Toy.latest
    toy.gate = threading.Semaphore(0)
    together = [asyncio.create_task(collect(run(engine, source(Ask(frames=3), [n, n, n, n])))) for n in (1, 2)]
    await settled(lambda: engine.stats().running == 2)
    await a_moment()
    toy.gate.release(10**6)
    outcomes = await asyncio.gather(*together, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [BatchLengthError, BatchLengthError]
    assert "a step of 2 gave 1 outputs" in str(outcomes[0])
    assert (await collect(run(engine, source(Ask(frames=2), [7, 8, 9]))))[0] == [7, 8]
