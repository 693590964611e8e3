"""The only queue of a stage: order, bounds, and that no place is ever lost or given twice."""

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_ray.engine import admission as admission_module
from omni_ray.engine.admission import Admission
from omni_ray.engine.options import EngineOptions
from omni_ray.engine.types import Request
from omni_ray.errors import SaturatedError, StageFailedError
from tests.clock import put_clock


def admission(places: int = 1, queue: int = 64, timeout_s: float = 30, stall_s: float = 60) -> Admission:
    return Admission(
        "talker", EngineOptions(max_num_seqs=places, max_queue=queue, queue_timeout_s=timeout_s, stall_s=stall_s)
    )


def request(name: str, priority: int = 0, served_s: float = 0) -> Request:
    return Request(name, seed=0, priority=priority, served_s=served_s)


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


def idle(of: Admission) -> bool:
    stats = of.stats()
    return (stats.running, stats.queued, stats.oldest_wait_s) == (0, 0, 0.0)


class Visitor:
    """A request that takes a place and holds it until told to leave."""

    def __init__(self, of: Admission, asking: Request, order: list[str] | None = None) -> None:
        self.inside, self.leave = asyncio.Event(), asyncio.Event()
        self._order = order if order is not None else []
        self.task = asyncio.ensure_future(self._visit(of, asking))

    async def _visit(self, of: Admission, asking: Request) -> None:
        async with of.place(asking):
            self._order.append(asking.request_id)
            self.inside.set()
            await self.leave.wait()


async def test_order_by_priority_then_served_seconds_then_arrival():
    line, order = admission(), []
    first = Visitor(line, request("holder"), order)
    await settle()
    waiting = [
        Visitor(line, request("late", priority=1), order),
        Visitor(line, request("greedy", served_s=90), order),
        Visitor(line, request("fresh-1", served_s=3), order),
        Visitor(line, request("fresh-2", served_s=3), order),
        Visitor(line, request("urgent", priority=-1, served_s=500), order),
    ]
    await settle()
    for visitor in (first, *waiting):
        visitor.leave.set()
    await asyncio.gather(first.task, *(v.task for v in waiting))
    assert order == ["holder", "urgent", "fresh-1", "fresh-2", "greedy", "late"]
    assert idle(line)


async def test_never_more_than_the_places():
    line, inside, most = admission(places=3), 0, 0

    async def visit(n: int) -> None:
        nonlocal inside, most
        async with line.place(request(str(n))):
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0)
            inside -= 1

    await asyncio.gather(*(visit(n) for n in range(40)))
    assert most == 3
    assert idle(line)


async def test_full_line_refuses_at_once_and_says_so():
    line = admission(places=1, queue=1)
    visitors = [Visitor(line, request("a")), Visitor(line, request("b"))]
    await settle()
    with pytest.raises(SaturatedError, match="stage talker is full: 1 running, 1 waiting"):
        async with line.place(request("c")):
            pytest.fail("no place for this")
    for visitor in visitors:
        visitor.leave.set()
    await asyncio.gather(*(v.task for v in visitors))
    assert idle(line)


async def test_a_full_line_gives_way_to_whoever_ranks_before_its_last():
    """A flood of one key, or of batch work, would else keep everybody out: whoever comes last is refused, always."""
    line, order = admission(places=1, queue=3), []
    holder = Visitor(line, request("holder"), order)
    await settle()
    flood = [Visitor(line, request(f"flood-{n}", served_s=5.0 * n), order) for n in range(3)]
    await settle()
    with pytest.raises(SaturatedError, match="1 running, 3 waiting"):
        await line.place(request("flood-3", served_s=15)).__aenter__()
    other = Visitor(line, request("other", served_s=2), order)
    chat = Visitor(line, request("chat", priority=-1, served_s=100), order)
    await settle()
    for refused in flood[1:]:
        with pytest.raises(SaturatedError, match="is full"):
            await refused.task
    visitors = (holder, flood[0], other, chat)
    for visitor in visitors:
        visitor.leave.set()
    await asyncio.gather(*(v.task for v in visitors))
    assert order == ["holder", "chat", "flood-0", "other"]
    assert idle(line)


async def test_reserved_places_are_for_priority_0():
    """All places taken by long batch jobs would let chat wait for the end of one of them."""
    options = EngineOptions(max_num_seqs=3, reserved_seqs=1)
    line, order = Admission("talker", options), []
    batch = [Visitor(line, request(f"batch-{n}", priority=1), order) for n in range(3)]
    await settle()
    assert order == ["batch-0", "batch-1"]
    chat = Visitor(line, request("chat"), order)
    await settle()
    assert order[-1] == "chat"
    second = Visitor(line, request("chat-2"), order)
    await settle()
    chat.leave.set()
    await settle()
    assert order[-1] == "chat-2"
    second.leave.set()
    await settle()
    assert order[-1] == "chat-2", "a reserved place was given to batch work"
    batch[0].leave.set()
    await settle()
    assert order[-1] == "batch-2"
    for visitor in batch:
        visitor.leave.set()
    await asyncio.gather(*(v.task for v in (*batch, chat, second)))
    assert idle(line)


def test_how_many_places_are_reserved():
    default = {n: EngineOptions(max_num_seqs=n) for n in (1, 3, 4, 8, 15, 64)}
    assert [o.places_of(1) for o in default.values()] == [1, 3, 3, 7, 14, 56]
    assert [o.places_of(0) for o in default.values()] == list(default)
    assert EngineOptions(max_num_seqs=8, reserved_seqs=0).places_of(5) == 8
    with pytest.raises(ValueError, match="leave none for others"):
        EngineOptions(max_num_seqs=2, reserved_seqs=2)


async def test_no_line_at_all():
    line = admission(places=1, queue=0)
    async with line.place(request("a")):
        with pytest.raises(SaturatedError):
            await line.place(request("b")).__aenter__()
    async with line.place(request("c")):
        pass


async def test_waiting_too_long_is_saturated():
    line = admission(timeout_s=0.02)
    holder = Visitor(line, request("a"))
    await settle()
    with pytest.raises(SaturatedError, match=r"stage talker had no place within 0\.02 s"):
        await line.place(request("b")).__aenter__()
    assert line.stats().queued == 0
    holder.leave.set()
    await holder.task
    assert idle(line)


async def test_failure_inside_frees_the_place():
    line = admission()
    with pytest.raises(ValueError, match="boom"):
        async with line.place(request("a")):
            raise ValueError("boom")
    assert idle(line)


async def test_cancelled_while_waiting():
    line = admission()
    holder, gone, next_one = (Visitor(line, request(n)) for n in ("a", "b", "c"))
    await settle()
    gone.task.cancel()
    await settle()
    assert line.stats().queued == 1
    holder.leave.set()
    await next_one.inside.wait()
    next_one.leave.set()
    await asyncio.gather(holder.task, next_one.task)
    assert gone.task.cancelled()
    assert idle(line)


async def test_place_comes_free_in_the_step_after_the_cancellation():
    """The freed place skipped the cancelled entry and dropped it; the cancelled request then raised ``ValueError:
    list.remove(x)`` in place of ``CancelledError``, and its client got a 500.
    """
    line = admission()
    holder, gone = Visitor(line, request("a")), Visitor(line, request("b"))
    await settle()
    holder.leave.set()
    gone.task.cancel()
    await settle()
    assert gone.task.cancelled()
    assert idle(line)


async def test_cancelled_at_the_moment_of_the_grant():
    """The place was handed over, and its new owner gave up before it could run: the place must go on."""
    line = admission()
    holder, gone, next_one = (Visitor(line, request(n)) for n in ("a", "b", "c"))
    await settle()
    holder.leave.set()
    await asyncio.sleep(0)  # the holder runs and leaves; the grant to b is made, b has not run yet
    gone.task.cancel()
    await asyncio.wait_for(next_one.inside.wait(), 10)
    next_one.leave.set()
    await asyncio.gather(holder.task, next_one.task)
    assert idle(line)


async def test_oldest_wait():
    line = admission()
    holder, waiter = Visitor(line, request("a")), Visitor(line, request("b"))
    await asyncio.sleep(0.03)
    stats = line.stats()
    assert (stats.running, stats.queued, stats.max_num_seqs) == (1, 1, 1)
    assert 0.01 < stats.oldest_wait_s < 5
    for visitor in (holder, waiter):
        visitor.leave.set()
    await asyncio.gather(holder.task, waiter.task)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3), st.integers(0, 4), st.integers(0, 2**32))
def test_no_interleaving_loses_a_place(places: int, queue: int, seed: int):
    """Random arrivals, departures, cancellations and timeouts in random steps; afterwards every place is free again."""
    dice = random.Random(seed)

    async def stress() -> None:
        line = admission(places, queue, timeout_s=dice.choice([0.0005, 30]))
        inside = 0

        async def visit(name: str) -> None:
            nonlocal inside
            async with line.place(request(name, dice.randrange(2), dice.randrange(3))):
                inside += 1
                assert inside <= places
                try:
                    for _ in range(dice.randrange(4)):
                        await asyncio.sleep(0)
                finally:
                    inside -= 1

        tasks: list[asyncio.Task[None]] = []
        for n in range(25):
            tasks.append(asyncio.ensure_future(visit(str(n))))
            for _ in range(dice.randrange(3)):
                await asyncio.sleep(dice.choice([0, 0, 0, 0.0005]))
            if dice.random() < 0.5:
                dice.choice(tasks).cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert outcome is None or isinstance(outcome, SaturatedError | asyncio.CancelledError), repr(outcome)
        assert idle(line)
        async with asyncio.timeout(10):
            for n in range(places):
                await line.place(request(f"again-{n}")).__aenter__()

    asyncio.run(stress())


class TestHang:
    """``check``: work in hand and nothing out for ``stall_s``."""

    @pytest.fixture(autouse=True)
    def _clock(self, monkeypatch: pytest.MonkeyPatch):
        self.pass_by = put_clock(monkeypatch, admission_module).pass_by

    def stalled(self, line: Admission) -> bool:
        try:
            line.check()
        except StageFailedError:
            return True
        return False

    def test_idle_is_healthy(self):
        line = admission(stall_s=60)
        self.pass_by(120)
        assert not self.stalled(line)

    async def test_waiting_for_input_is_healthy(self):
        """A talker waits for a slow thinker: it has a place and nothing to do."""
        line = admission(stall_s=60)
        async with line.place(request("a")):
            self.pass_by(120)
            assert not self.stalled(line)

    def test_computing_without_output_hangs(self):
        line = admission(stall_s=60)
        with line.computing():
            assert not self.stalled(line)
            self.pass_by(120)
            assert self.stalled(line)
            line.progressed()
            assert not self.stalled(line)
        assert not self.stalled(line)

    def test_work_after_a_long_rest_starts_a_new_clock(self):
        line = admission(stall_s=60)
        self.pass_by(120)
        with line.computing():
            assert not self.stalled(line)

    def test_one_ends_another_hangs(self):
        line = admission(stall_s=60)
        with line.computing():
            self.pass_by(90)
            with line.computing():
                pass
            assert not self.stalled(line), "something came out just now"
            self.pass_by(90)
            assert self.stalled(line)

    def test_giving_up_is_no_progress(self):
        """Clients that time out and come again restarted the clock each time: a hung engine stayed healthy for ever."""
        line = admission(stall_s=60)
        with line.computing():
            for error in (asyncio.CancelledError, GeneratorExit):
                self.pass_by(45)
                with pytest.raises(error), line.computing():
                    raise error
            assert self.stalled(line)

    def test_an_error_is_an_answer(self):
        line = admission(stall_s=60)
        with line.computing():
            self.pass_by(90)
            with pytest.raises(ValueError, match="bad input"), line.computing():
                raise ValueError("bad input")
            assert not self.stalled(line)
