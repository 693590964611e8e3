"""The only queue of a stage: bounded, ordered by priority and by what the request's key was already served.

Also knows whether the engine hangs: it counts the requests that have input in hand and when the last output came.
"""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from omni_ray.engine.base import EngineStats
from omni_ray.engine.options import EngineOptions
from omni_ray.engine.types import Request
from omni_ray.errors import SaturatedError, StageFailedError


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request in line; ``rank`` decides, the smallest first."""

    rank: tuple[int, float, int]
    since: float
    turn: asyncio.Future[None]


class Admission:
    """Places for ``max_num_seqs`` running requests and a waiting line of ``max_queue``.

    A full line gives way: whoever ranks before its last takes the last one's room, which is then refused. So a flood of
    one key, or of low priority, fills the line for nobody but itself.
    """

    def __init__(self, stage: str, options: EngineOptions) -> None:
        self._stage = stage
        self._options = options
        self._running = 0
        self._line: list[_Waiting] = []
        self._order = itertools.count()
        self._computing = 0
        self._progress_at = time.monotonic()
        self._calls: dict[object, float] = {}  # when each began

    @asynccontextmanager
    async def place(self, request: Request) -> AsyncIterator[None]:
        """Hold a place while the body runs.

        Raises:
            SaturatedError: the line is full, or no place came free within ``queue_timeout_s``.
        """
        await self._enter(request)
        try:
            yield
        finally:
            self._running -= 1
            self._call_next()

    async def _enter(self, request: Request) -> None:
        if self._running < self._options.places_of(request.priority):
            self._running += 1
            return
        now = time.monotonic()
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = _Waiting((request.priority, request.served_s, next(self._order)), now, turn)
        if len(self._line) >= self._options.max_queue:
            self._make_room(entry)
        self._line.append(entry)
        try:
            async with asyncio.timeout(self._options.queue_timeout_s):
                await turn
        except (asyncio.CancelledError, TimeoutError) as error:
            if entry in self._line:
                self._line.remove(entry)
            elif turn.done() and not turn.cancelled() and turn.exception() is None:
                self._running -= 1  # granted in the very step in which the request gave up
                self._call_next()
            if isinstance(error, TimeoutError):
                limit = self._options.queue_timeout_s
                raise SaturatedError(
                    f"stage {self._stage} had no place within {limit:g} s", retry_after_s=self._retry_after_s()
                ) from None
            raise

    def _make_room(self, entry: _Waiting) -> None:
        """Refuse the last in line, which may be ``entry`` itself."""
        words = f"stage {self._stage} is full: {self._running} running, {len(self._line)} waiting"
        error = SaturatedError(words, retry_after_s=self._retry_after_s())
        last = max(self._line, key=lambda waiting: waiting.rank, default=entry)
        if entry.rank >= last.rank:
            raise error
        self._line.remove(last)
        if not last.turn.done():  # else it is giving up in this very step
            last.turn.set_exception(error)

    def _call_next(self) -> None:
        """Give a place that came free to the first in line who may have it."""
        for entry in sorted(self._line, key=lambda waiting: waiting.rank):
            if self._running < self._options.places_of(entry.rank[0]):
                self._line.remove(entry)
                if not entry.turn.done():
                    self._running += 1
                    entry.turn.set_result(None)
                    return

    def _retry_after_s(self) -> int:
        """About as long as the line takes now."""
        return min(30, max(1, math.ceil(self.stats().oldest_wait_s)))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Mark that the engine has input in hand; without progress for ``stall_s`` it counts as hung.

        Giving up is no progress: clients that time out must not hide a hang.
        """
        if self._computing == 0:
            self._progress_at = time.monotonic()
        self._computing += 1
        gave_up = False
        try:
            yield
        except (asyncio.CancelledError, GeneratorExit):
            gave_up = True
            raise
        finally:
            self._computing -= 1
            if not gave_up:
                self.progressed()

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Mark one call that ``stall_s`` bounds by itself, whatever else gets on meanwhile. For any thread."""
        key = object()
        self._calls[key] = time.monotonic()
        try:
            yield
        finally:
            del self._calls[key]

    def progressed(self) -> None:
        """An output or a step came out."""
        self._progress_at = time.monotonic()

    def check(self) -> None:
        """Raise ``StageFailedError`` if for ``stall_s`` nothing came out of work in hand, or a call did not return."""
        now = time.monotonic()
        longest = max((now - began for began in self._calls.copy().values()), default=0.0)
        if longest > self._options.stall_s:
            raise StageFailedError(f"stage {self._stage} hangs: one call has been running for {longest:.0f} s")
        idle = now - self._progress_at
        if self._computing and idle > self._options.stall_s:
            raise StageFailedError(
                f"stage {self._stage} hangs: {self._computing} requests in hand, no output for {idle:.0f} s"
            )

    def stats(self) -> EngineStats:
        """Counters right now."""
        now = time.monotonic()
        oldest = max((now - entry.since for entry in self._line), default=0.0)
        return EngineStats(self._running, len(self._line), oldest, self._options.max_num_seqs)
