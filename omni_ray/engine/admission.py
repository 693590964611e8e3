"""The only queue of a stage: bounded, ordered by priority and by what the request's key was already served.

Also knows whether the engine hangs: it counts the requests that have input in hand and when the last output came.
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from omni_ray.engine.base import EngineStats
from omni_ray.engine.options import EngineOptions
from omni_ray.engine.types import Request
from omni_ray.errors import SaturatedError, StageFailedError


class Admission:
    """Places for ``max_num_seqs`` running requests and a waiting line of ``max_queue``."""

    def __init__(self, stage: str, options: EngineOptions) -> None:
        self._stage = stage
        self._options = options
        self._running = 0
        self._waiting: list[tuple[int, float, int, float, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self._computing = 0
        self._progress_at = time.monotonic()

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
            self._leave()

    async def _enter(self, request: Request) -> None:
        if self._running < self._options.max_num_seqs:
            self._running += 1
            return
        if len(self._waiting) >= self._options.max_queue:
            raise SaturatedError(f"stage {self._stage} is full: {self._running} running, {len(self._waiting)} waiting")
        turn = asyncio.get_running_loop().create_future()
        entry = (request.priority, request.served_s, next(self._order), time.monotonic(), turn)
        heapq.heappush(self._waiting, entry)
        try:
            async with asyncio.timeout(self._options.queue_timeout_s):
                await turn
        except (asyncio.CancelledError, TimeoutError) as error:
            if turn.done() and not turn.cancelled():
                self._leave()  # granted in the very step in which the request gave up
            elif entry in self._waiting:  # a place that came free since may have skipped this entry already
                self._waiting.remove(entry)
                heapq.heapify(self._waiting)
            if isinstance(error, TimeoutError):
                limit = self._options.queue_timeout_s
                raise SaturatedError(f"stage {self._stage} had no place within {limit:g} s") from None
            raise

    def _leave(self) -> None:
        """Hand the place to the next in line, or free it."""
        while self._waiting:
            turn = heapq.heappop(self._waiting)[-1]
            if not turn.done():
                turn.set_result(None)
                return
        self._running -= 1

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

    def progressed(self) -> None:
        """An output or a step came out."""
        self._progress_at = time.monotonic()

    def check(self) -> None:
        """Raise ``StageFailedError`` if work is in hand and nothing came out for ``stall_s``."""
        idle = time.monotonic() - self._progress_at
        if self._computing and idle > self._options.stall_s:
            raise StageFailedError(
                f"stage {self._stage} hangs: {self._computing} requests in hand, no output for {idle:.0f} s"
            )

    def stats(self) -> EngineStats:
        """Counters right now."""
        now = time.monotonic()
        oldest = max((now - entry[3] for entry in self._waiting), default=0.0)
        return EngineStats(self._running, len(self._waiting), oldest, self._options.max_num_seqs)
