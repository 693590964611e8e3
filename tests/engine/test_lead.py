"""Lead, and the order of work that follows from it: in the codec's batches and in the autoregressive loop."""

import asyncio
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext

import pytest

from omni_ray.engine.batches import Batches
from omni_ray.engine.lead import AHEAD_S, Lead
from omni_ray.engine.types import Request


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def lead(clock: Clock, priority: int = 0, spoken_s: float | None = None, ago_s: float = 0, served_s: float = 0) -> Lead:
    """A stream that emitted ``spoken_s`` seconds since it began to speak ``ago_s`` ago, or has not begun."""
    made = Lead(Request("r", seed=0, priority=priority, served_s=served_s), clock)
    if spoken_s is not None:
        clock.now -= ago_s
        made.emitted(0.08)
        clock.now += ago_s
        made.emitted(spoken_s)
    return made


def test_lead_is_sound_emitted_minus_time_since_the_first_chunk() -> None:
    clock = Clock()
    stream = Lead(Request("r", seed=0), clock)
    clock.now += 7
    assert stream.seconds() is None
    stream.emitted(0.5)
    assert stream.seconds() == pytest.approx(0.5)
    clock.now += 2
    stream.emitted(4.0)
    assert stream.seconds() == pytest.approx(2.0)
    assert stream.ahead()
    clock.now += 3
    assert stream.seconds() == pytest.approx(-1.0)
    assert not stream.ahead()


def test_order_of_work() -> None:
    """Behind the listener first, then first chunks as they came, then whoever is ahead; batch work after chat, and a
    key's flood after everybody else's requests: else its many streams, all of them late, would leave little room."""
    clock = Clock()
    first = lead(clock)
    clock.now += 0.1
    order = {
        "chat far behind": lead(clock, 0, spoken_s=1, ago_s=3),
        "chat nearly late": lead(clock, 0, spoken_s=2, ago_s=2),
        "chat new, came first": first,
        "chat new": lead(clock),
        "chat far behind, of a key that was given much": lead(clock, 0, spoken_s=1, ago_s=9, served_s=60),
        "batch far behind": lead(clock, 2, spoken_s=1, ago_s=60),
        "batch new": lead(clock, 2),
        "chat ahead": lead(clock, 0, spoken_s=5, ago_s=5 - AHEAD_S),
        "chat far ahead": lead(clock, 0, spoken_s=50, ago_s=5),
        "batch ahead": lead(clock, 2, spoken_s=5, ago_s=2),
    }
    assert sorted(order, key=lambda name: order[name].urgency()) == list(order)


class Steps:
    """Decodes items at ``unit_s`` per unit of size and remembers what each step held."""

    def __init__(self, unit_s: float) -> None:
        self.unit_s = unit_s
        self.seen: list[list[str]] = []
        self.go_on = threading.Event()
        self.go_on.set()

    def __call__(self, items: Sequence[tuple[str, int]]) -> list[str]:
        self.seen.append([name for name, _ in items])
        assert self.go_on.wait(60)
        time.sleep(self.unit_s * sum(size for _, size in items))
        return [name for name, _ in items]


def batches(steps: Steps, step_s: float) -> Batches[tuple[str, int], str]:
    return Batches("codec", steps, lambda output: output, nullcontext, size=lambda item: item[1], step_s=step_s)


async def begun(steps: Steps, count: int) -> None:
    async with asyncio.timeout(20):
        while len(steps.seen) < count:  # noqa: ASYNC110 - written by a thread
            await asyncio.sleep(0.001)


async def test_a_step_takes_the_most_urgent_and_no_more_than_fits() -> None:
    steps, clock = Steps(0.001), Clock()
    line = batches(steps, step_s=0.05)
    try:
        assert await line.submit(("warm", 40), lead(clock)) == "warm"  # now it knows: some 1 ms per unit
        steps.go_on.clear()
        ahead = [asyncio.ensure_future(line.submit((f"ahead-{n}", 25), lead(clock, 0, 9, 1))) for n in range(4)]
        await begun(steps, 2)  # the first of them is being decoded
        late = asyncio.ensure_future(line.submit(("late", 25), lead(clock, 0, 1, 5)))
        new = asyncio.ensure_future(line.submit(("new", 4), lead(clock)))
        await asyncio.sleep(0)
        steps.go_on.set()
        answers = await asyncio.gather(*ahead, late, new)
    finally:
        line.stop()
    assert answers == [f"ahead-{n}" for n in range(4)] + ["late", "new"]
    assert [name for step in steps.seen for name in step] == [
        "warm", "ahead-0", "late", "new", "ahead-1", "ahead-2", "ahead-3",
    ]  # fmt: skip
    assert all(len(step) <= 2 for step in steps.seen)


async def test_an_idle_thread_is_given_work_however_far_ahead_it_is() -> None:
    """Lead orders work. It never withholds any: an item that alone is too long for a step is decoded at once."""
    steps, clock = Steps(0.001), Clock()
    line = batches(steps, step_s=0.001)
    try:
        for n in range(3):
            started = time.monotonic()
            await line.submit((str(n), 50), lead(clock, 2, 1000, 1))
            assert time.monotonic() - started < 2
    finally:
        line.stop()
    assert steps.seen == [["0"], ["1"], ["2"]]


async def test_cancelled_items_leave_the_line() -> None:
    steps, clock = Steps(0.001), Clock()
    line = batches(steps, step_s=0.02)
    try:
        await line.submit(("warm", 20), lead(clock))
        steps.go_on.clear()
        running = [asyncio.ensure_future(line.submit((str(n), 20), lead(clock))) for n in range(5)]
        await begun(steps, 2)
        running[2].cancel()
        await asyncio.sleep(0)
        steps.go_on.set()
        await asyncio.gather(*running, return_exceptions=True)
    finally:
        line.stop()
    assert [name for step in steps.seen for name in step] == ["warm", "0", "1", "3", "4"]
