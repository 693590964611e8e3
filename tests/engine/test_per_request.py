"""The per-request engine: cancellation frees everything, and a hang shows however impatient the clients are."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import pytest

from omni_ray.config.pipeline import Edge, StagePipelineConfig
from omni_ray.engine import admission
from omni_ray.engine.base import EngineContext
from omni_ray.engine.options import PerRequestOptions
from omni_ray.engine.per_request import PerRequestEngine, PerRequestModel
from omni_ray.engine.resume import Resume
from omni_ray.engine.threads import Threads
from omni_ray.engine.types import Finish, Output, Request, TextChunk
from omni_ray.errors import SaturatedError, StageFailedError
from tests.clock import put_clock

STAGE = StagePipelineConfig(
    name="thinker",
    execution_type="llm_ar",
    model_arch="Echo",
    inputs=(Edge(source="request", parts=("messages",), processor="p:q"),),
)


class Echo(PerRequestModel):
    """One text chunk per input; ``compute`` is called with the input in a thread."""

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        self.compute: Callable[[str], str] = str
        self.loaded_in: str | None = None
        self.closed: list[str] = []

    def load(self) -> None:
        self.loaded_in = threading.current_thread().name

    async def generate(
        self,
        request: Request,
        inputs: Mapping[str, AsyncIterator[Any]],
        threads: Threads,
        resume: Resume | None = None,
    ) -> AsyncIterator[Output]:
        try:
            (items,) = inputs.values()
            position = 0
            async for item in items:
                yield TextChunk(position, await threads.run(self.compute, item))
                position += 1
            yield Finish()
        finally:
            self.closed.append(request.request_id)


@pytest.fixture
async def made():
    """Makes engines with given options and stops them afterwards."""
    engines: list[PerRequestEngine] = []

    async def make(**options: Any) -> tuple[PerRequestEngine, Echo]:
        engine = PerRequestEngine(EngineContext(STAGE, None, Echo, PerRequestOptions(**options)))
        engines.append(engine)
        await engine.start()
        model = engine._model
        assert isinstance(model, Echo)
        return engine, model

    yield make
    for engine in engines:
        await engine.stop()


async def words(*items: str) -> AsyncIterator[str]:
    for item in items:
        yield item


async def collect(engine: PerRequestEngine, name: str, *items: str) -> list[Output]:
    return [output async for output in engine.generate(Request(name, seed=0), {"request": words(*items)})]


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - counters are polled, as a health check does
            await asyncio.sleep(0.002)


def counters(engine: PerRequestEngine) -> tuple[int, int]:
    stats = engine.stats()
    return stats.running, stats.queued


async def test_loads_off_the_event_loop(made):
    _, model = await made()
    assert model.loaded_in != threading.main_thread().name


async def test_outputs_end_with_one_finish(made):
    engine, model = await made()
    assert await collect(engine, "a", "x", "y") == [TextChunk(0, "x"), TextChunk(1, "y"), Finish()]
    assert counters(engine) == (0, 0)
    assert model.closed == ["a"]


async def test_requests_run_side_by_side(made):
    engine, model = await made(threads=2)
    both = threading.Barrier(2)
    model.compute = lambda item: f"{item}{both.wait(30)}"[0]
    answers = await asyncio.gather(collect(engine, "a", "x"), collect(engine, "b", "y"))
    assert [answer[0].text for answer in answers] == ["x", "y"]


async def test_one_failure_touches_one_request(made):
    engine, model = await made()

    def compute(item: str) -> str:
        if item == "bad":
            raise ValueError("bad input")
        return item

    model.compute = compute
    good, bad = await asyncio.gather(
        collect(engine, "a", "x", "y"), collect(engine, "b", "bad"), return_exceptions=True
    )
    assert good[-1] == Finish()
    assert isinstance(bad, ValueError)
    assert counters(engine) == (0, 0)
    await engine.check_health()


async def test_full_engine_refuses_before_it_asks_for_input(made):
    """Design 5: inputs are lazy, so that nothing upstream starts for a request that is refused."""
    engine, model = await made(max_num_seqs=1, max_queue=0)
    release = threading.Event()
    model.compute = lambda item: str(release.wait(30))
    first = asyncio.ensure_future(collect(engine, "a", "x"))
    await until(lambda: counters(engine) == (1, 0))
    asked = []

    async def watched() -> AsyncIterator[str]:
        asked.append(True)
        yield "y"

    with pytest.raises(SaturatedError):
        await anext(engine.generate(Request("b", seed=0), {"request": watched()}))
    assert not asked
    release.set()
    await first


class TestCancel:
    """Closing the iterator stops the work within one step and frees everything."""

    async def test_close_between_outputs(self, made):
        engine, model = await made()
        async with aclosing(engine.generate(Request("a", seed=0), {"request": words("x", "y")})) as outputs:
            assert await anext(outputs) == TextChunk(0, "x")
        assert model.closed == ["a"]
        assert counters(engine) == (0, 0)

    async def test_cancel_while_waiting_for_input(self, made):
        engine, _ = await made()

        async def never() -> AsyncIterator[str]:
            await asyncio.sleep(60)
            yield "x"

        task = asyncio.ensure_future(anext(engine.generate(Request("a", seed=0), {"request": never()})))
        await until(lambda: counters(engine) == (1, 0))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert counters(engine) == (0, 0)

    async def test_cancel_in_the_middle_of_a_step(self, made):
        """The request is over at once; the thread goes on until its call returns."""
        engine, model = await made()
        release = threading.Event()
        model.compute = lambda item: str(release.wait(30))
        task = asyncio.ensure_future(collect(engine, "a", "x"))
        await until(lambda: len(engine._admission._calls) == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert model.closed == ["a"]
        assert counters(engine) == (0, 0)
        assert len(engine._admission._calls) == 1, "the call still holds its thread"
        release.set()
        await until(lambda: not engine._admission._calls)

    async def test_a_call_that_waits_for_a_thread_never_runs(self, made):
        """Cancelled work that was only queued for the pool must not cost the others a step."""
        engine, model = await made(threads=1)
        release, ran = threading.Event(), []

        def compute(item: str) -> str:
            ran.append(item)
            release.wait(30)
            return item

        model.compute = compute
        first = asyncio.ensure_future(collect(engine, "a", "x"))
        await until(lambda: ran == ["x"])
        second = asyncio.ensure_future(collect(engine, "b", "y"))
        await until(lambda: engine._threads._pool._work_queue.qsize() == 1)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        release.set()
        await first
        await until(lambda: not engine._admission._calls)
        assert ran == ["x"]

    async def test_cancel_while_queued(self, made):
        engine, model = await made(max_num_seqs=1)
        release = threading.Event()
        model.compute = lambda item: str(release.wait(30))
        first = asyncio.ensure_future(collect(engine, "a", "x"))
        second = asyncio.ensure_future(collect(engine, "b", "y"))
        await until(lambda: counters(engine) == (1, 1))
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        release.set()
        await first
        assert counters(engine) == (0, 0)
        assert model.closed == ["a"], "b never reached the model"


class TestHealth:
    """Unhealthy means: a call has been running for longer than ``stall_s``."""

    @pytest.fixture(autouse=True)
    def _clock(self, monkeypatch: pytest.MonkeyPatch):
        self.pass_by = put_clock(monkeypatch, admission).pass_by

    async def test_hang_is_noticed(self, made):
        engine, model = await made(stall_s=60)
        release = threading.Event()
        model.compute = lambda item: str(release.wait(30))
        task = asyncio.ensure_future(collect(engine, "a", "x"))
        await until(lambda: len(engine._admission._calls) == 1)
        await engine.check_health()
        self.pass_by(90)
        with pytest.raises(StageFailedError, match="stage thinker hangs: one call has been running for"):
            await engine.check_health()
        release.set()
        await task
        await engine.check_health()

    async def test_hang_shows_although_others_get_on(self, made):
        """With two threads every output of the other one restarted the clock: half the replica hung for ever."""
        engine, model = await made(stall_s=60, threads=2)
        release = threading.Event()
        model.compute = lambda item: str(release.wait(30)) if item == "hang" else item
        hung = asyncio.ensure_future(collect(engine, "a", "hang"))
        await until(lambda: len(engine._admission._calls) == 1)
        for _ in range(3):
            await engine.check_health()
            self.pass_by(25)
            assert (await collect(engine, "b", "x"))[0] == TextChunk(0, "x")
        with pytest.raises(StageFailedError, match="hangs"):
            await engine.check_health()
        release.set()
        await hung
        await engine.check_health()

    async def test_hang_shows_although_clients_give_up_sooner(self, made):
        """With the default deadlines (60 s each) every client left just before the engine counted as hung: the thread
        stayed stuck, each new request started a new clock, and the replica was never replaced.
        """
        engine, model = await made(stall_s=60, threads=1)
        release = threading.Event()
        model.compute = lambda item: str(release.wait(30))
        for n in range(3):
            asked = asyncio.ensure_future(collect(engine, str(n), "x"))
            await until(lambda: len(engine._admission._calls) == 1 and counters(engine) == (1, 0))
            await engine.check_health()
            self.pass_by(25)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
        with pytest.raises(StageFailedError, match="hangs"):
            await engine.check_health()
        release.set()

    async def test_waiting_for_input_is_never_unhealthy(self, made):
        """A talker whose thinker is slow: replacing it would kill streams that are fine."""
        engine, _ = await made(stall_s=60)
        more = asyncio.Event()

        async def slow() -> AsyncIterator[str]:
            yield "x"
            await more.wait()
            yield "y"

        async with aclosing(engine.generate(Request("a", seed=0), {"request": slow()})) as outputs:
            await anext(outputs)
            waits = asyncio.ensure_future(anext(outputs))
            await asyncio.sleep(0.02)
            self.pass_by(120)
            await engine.check_health()
            more.set()
            assert await waits == TextChunk(1, "y")

    async def test_a_slow_reader_is_never_unhealthy(self, made):
        engine, _ = await made(stall_s=60)
        async with aclosing(engine.generate(Request("a", seed=0), {"request": words("x", "y")})) as outputs:
            await anext(outputs)
            self.pass_by(120)
            await engine.check_health()

    async def test_simulated_compute_counts(self, made):
        """``threads.sleep`` stands for compute time, so a hanging fault knob is a hang."""
        engine, _ = await made(stall_s=60)
        task = asyncio.ensure_future(engine._threads.sleep(60))
        await until(lambda: len(engine._admission._calls) == 1)
        self.pass_by(90)
        with pytest.raises(StageFailedError):
            await engine.check_health()
        task.cancel()

    async def test_many_slow_steps_are_healthy(self, made):
        """Each step is shorter than ``stall_s``, the sum is longer; one thread, several requests queue for it."""
        engine, model = await made(stall_s=60, threads=1)
        checked: list[None] = []

        def compute(item: str) -> str:
            self.pass_by(25)
            checked.append(engine._admission.check())
            return item

        model.compute = compute
        await asyncio.gather(*(collect(engine, str(n), "x", "y") for n in range(4)))
        assert len(checked) == 8
