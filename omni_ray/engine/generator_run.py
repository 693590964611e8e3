"""One upstream generator on its own thread: steps under the replica's lock, pieces to the event loop, clean ends."""

import asyncio
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_ray.engine.rng import RequestRandomness
from omni_ray.engine.types import Request
from omni_ray.errors import StageFailedError


@dataclass(frozen=True, slots=True)
class Piece:
    """Sound a generator yields: float32 ``samples`` [n] or [channels, n]; ``whole`` marks the entire answer again."""

    samples: NDArray[np.float32]
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """What a generator starts from: the request, everything its processor gave, and a directory of its own.

    ``scratch`` is deleted with all its files when the generator is closed.
    """

    request: Request
    inputs: Sequence[Any]
    scratch: Path


class StepLock:
    """One step of one generator at a time; tells how long the running one has taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._since: float | None = None

    @contextmanager
    def step(self, randomness: RequestRandomness) -> Iterator[None]:
        """Run the body alone, on the request's own random state."""
        with self._lock:
            self._since = time.monotonic()
            try:
                with randomness.installed():
                    yield
            finally:
                self._since = None

    def step_seconds(self) -> float:
        """Seconds since the running step began; 0 without one."""
        since = self._since
        return 0.0 if since is None else time.monotonic() - since


class GeneratorRun:
    """Advances a generator as its pieces are read, at most ``ahead`` pieces ahead, until it ends or is cancelled.

    Attributes:
        closed: done once the generator is closed, its directory is gone and its thread has nothing left to do.
    """

    def __init__(
        self,
        request: Request,
        inputs: Sequence[Any],
        speak: Callable[[Job], Iterator[Piece]],
        lock: StepLock,
        ahead: int,
    ) -> None:
        self._request = request
        self._inputs = inputs
        self._speak = speak
        self._lock = lock
        self._randomness = RequestRandomness(request.seed)
        self._free = threading.Semaphore(ahead)
        self._cancelled = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._arrived: asyncio.Queue[Piece | Exception | None] = asyncio.Queue()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        # not the interpreter's to wait for: a step that never returns must not keep a dying replica alive
        threading.Thread(target=self._work, name=f"generator-{request.request_id}", daemon=True).start()

    async def pieces(self) -> AsyncGenerator[Piece]:
        """Everything the generator yields; raises what it raised."""
        while (item := await self._arrived.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
            self._free.release()

    def cancel(self) -> None:
        """No further step begins; the generator is closed when the running one returns. May be called twice."""
        self._cancelled.set()
        self._free.release()

    def _work(self) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="omni_ray_") as scratch:
                self._advance(Job(self._request, self._inputs, Path(scratch)))
            self._tell(None)
        except Exception as error:
            self._tell(error)
        except BaseException as error:  # raised on the event loop, upstream's `sys.exit` would end all requests
            self._tell(StageFailedError(f"the model's generator raised {type(error).__name__}"))
        self._call(self._close)

    def _advance(self, job: Job) -> None:
        with self._lock.step(self._randomness):
            generator = self._speak(job)
        try:
            while self._may_go_on():
                with self._lock.step(self._randomness):
                    piece = None if self._cancelled.is_set() else next(generator, None)
                if piece is None:
                    return
                self._tell(piece)
        finally:
            with self._lock.step(self._randomness):
                _close(generator)

    def _may_go_on(self) -> bool:
        """Wait for the reader, holding no lock."""
        self._free.acquire()
        return not self._cancelled.is_set()

    def _tell(self, item: Piece | Exception | None) -> None:
        self._call(lambda: self._arrived.put_nowait(item))

    def _call(self, function: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def _close(self) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


def _close(generator: Iterator[Piece]) -> None:
    """Run the generator's ``finally`` now; a plain iterator has none."""
    if isinstance(generator, Generator):
        generator.close()
