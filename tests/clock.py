"""Time that no machine is too slow for: it stands still while there is anything to do."""

import asyncio
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

import pytest

T = TypeVar("T")

QUIET_S = 0.02
"""Sockets of this process have said so soon what they have to say."""


@pytest.fixture
async def virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The running loop's time, and ``time.monotonic``: when all wait, it jumps to where the first of them wakes.

    So a second passes in no time, and nothing is ever late. Not for tests whose work is done by threads or processes:
    to the loop they take no time, or for ever.
    """
    now = time.monotonic()
    selector: Any = asyncio.get_running_loop()._selector  # type: ignore[attr-defined]
    select = selector.select

    def skip(timeout: float | None) -> Any:
        nonlocal now
        if timeout is None or timeout <= 0:
            return select(timeout)
        alone = len(selector.get_map()) == 1  # the pipe by which threads wake the loop
        ready = select(0 if alone else min(timeout, QUIET_S))
        if not ready:
            now += timeout
        return ready

    monkeypatch.setattr(time, "monotonic", lambda: now)
    monkeypatch.setattr(selector, "select", skip)


class Clock:
    """Stands for ``time`` in a module that only asks how late it is; ``pass_by`` lets time pass without waiting."""

    def __init__(self) -> None:
        self._passed_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self._passed_s

    def pass_by(self, seconds: float) -> None:
        self._passed_s += seconds


def put_clock(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> Clock:
    """``module`` tells the time by what is returned, for this test."""
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def undisturbed(measure: Callable[[], T], holds: Callable[[T], bool], tries: int = 5) -> T:
    """What ``measure`` gives; measured again if ``holds`` denies it, as something else may have had the CPU.

    Only for figures of real time: what must be so each time is asserted of each time.
    """
    for _ in range(tries):
        if holds(measured := measure()):
            break
    return measured


async def a_moment() -> None:
    """Some 50 ms, on a busy machine more: all other tasks have many turns, and all threads that compute a while."""
    for _ in range(50):
        await asyncio.sleep(0.001)
