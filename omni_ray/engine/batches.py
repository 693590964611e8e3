"""Batches of blocking steps: one worker thread, one step at a time, for the most urgent of what is ready."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Generic, ParamSpec, TypeVar

from omni_ray.engine.lead import Lead
from omni_ray.errors import StageFailedError

Item = TypeVar("Item")
Result = TypeVar("Result")
P = ParamSpec("P")


class BatchLengthError(StageFailedError):
    """A batch gave another number of outputs than it has items: whose is whose can not be told, so none is used."""


def check_length(what: str, items: int, outputs: int) -> None:
    """``BatchLengthError`` unless there is one output for each item (C01: never handed on, never broadcast)."""
    if outputs != items:
        raise BatchLengthError(f"{what} of {items} gave {outputs} outputs")


@dataclass(slots=True)
class _Work(Generic[Item, Result]):
    item: Item
    lead: Lead
    done: asyncio.Future[Result]


class Batches(Generic[Item, Result]):
    """Collects items of concurrent requests and computes them together, off the event loop.

    A step takes the most urgent items first, and only as many as should be done in ``step_s``: what becomes urgent
    while it runs must not wait for long. It takes at least one, so nothing ready ever waits for an idle thread.

    A step that raises is taken apart: each of its items is computed alone, so only the guilty one fails. Whatever
    ``compute`` did before it raised must therefore not change what it then gives for an item.
    """

    def __init__(
        self,
        stage: str,
        compute: Callable[[Sequence[Item]], Sequence[Result]],
        check: Callable[[Result], Result],
        busy: Callable[[], AbstractContextManager[None]],
        size: Callable[[Item], int],
        step_s: float,
    ) -> None:
        """Make the worker thread.

        Args:
            stage: for messages.
            compute: one output per item, in order; blocking.
            check: raises if one item's output is unfit.
            busy: held around every step, whoever still waits for it: a hung step must not look idle because its
                clients gave up.
            size: how much work an item is, in any unit.
            step_s: longest step aimed at, by what the last ones took per unit.
        """
        self._stage = stage
        self._compute = compute
        self._check = check
        self._busy = busy
        self._size = size
        self._step_s = step_s
        self._unit_s: float | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batch")
        self._waiting: list[_Work[Item, Result]] = []
        self._running: list[_Work[Item, Result]] = []
        self._task: asyncio.Task[None] | None = None
        self._stopped = False

    async def run(self, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """``function`` in the worker thread, between steps."""
        await asyncio.get_running_loop().run_in_executor(self._thread, lambda: function(*args, **kwargs))

    def after_step(self, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Call ``function`` in the worker thread after the step in progress, without waiting for it."""
        with suppress(RuntimeError):  # stopped meanwhile
            self._thread.submit(function, *args, **kwargs)

    async def submit(self, item: Item, lead: Lead) -> Result:
        """The item's output; raises what computing it raised. ``lead`` is its request's.

        Cancelling drops the item before its step; a step in progress ends for the others.

        Raises:
            StageFailedError: stopped, or the batch's outputs are not one per item.
        """
        if self._stopped:
            raise StageFailedError(f"stage {self._stage} is stopped")
        work = _Work[Item, Result](item, lead, asyncio.get_running_loop().create_future())
        self._waiting.append(work)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._steps())
        return await work.done

    def stop(self) -> None:
        """Fail everything in hand and end the thread after its step."""
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
        for work in (*self._running, *self._waiting):
            if not work.done.done():
                work.done.set_exception(StageFailedError(f"stage {self._stage} is stopped"))
        self._thread.shutdown(wait=False)  # what is to run after the step still does

    async def _steps(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            await asyncio.sleep(0)  # requests that became ready in this very turn of the loop join
            self._choose()
            if not self._running:
                continue
            with self._busy():
                items = [work.item for work in self._running]
                results = await loop.run_in_executor(self._thread, self._timed_step, items)
            for work, result in zip(self._running, results, strict=True):
                if work.done.done():
                    continue  # cancelled meanwhile
                if isinstance(result, Exception):
                    work.done.set_exception(result)
                else:
                    work.done.set_result(result)
            self._running = []

    def _choose(self) -> None:
        """Put the most urgent of the waiting items into the next step, as many as it has room for."""
        ready = sorted((work for work in self._waiting if not work.done.done()), key=lambda work: work.lead.urgency())
        room = self._step_s / self._unit_s if self._unit_s else math.inf
        self._running, self._waiting = [], []
        for work in ready:
            room -= self._size(work.item)
            (self._running if room >= 0 or not self._running else self._waiting).append(work)

    def _timed_step(self, items: Sequence[Item]) -> list[Result | Exception]:
        started = time.monotonic()
        try:
            return self._step(items)
        finally:
            if units := sum(map(self._size, items)):
                latest = (time.monotonic() - started) / units
                self._unit_s = latest if self._unit_s is None else 0.8 * self._unit_s + 0.2 * latest

    def _step(self, items: Sequence[Item]) -> list[Result | Exception]:
        """One step, in the thread; what failed comes back as the exception to raise in its own request."""
        try:
            outputs = self._compute(items)
            check_length("a batch", len(items), len(outputs))
        except BatchLengthError as error:
            return [StageFailedError(f"stage {self._stage}: {error}") for _ in items]
        except Exception as error:
            if len(items) == 1:
                return [error]
            return [self._step([item])[0] for item in items]
        return [self._checked(output) for output in outputs]

    def _checked(self, output: Result) -> Result | Exception:
        try:
            return self._check(output)
        except Exception as error:
            return error
