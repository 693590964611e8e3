"""A model's blocking calls, off the event loop; each is watched on its own."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

from omni_ray.engine.admission import Admission

P = ParamSpec("P")
R = TypeVar("R")


class Threads:
    """A small pool of threads; a call that holds one for longer than ``stall_s`` makes the engine count as hung."""

    def __init__(self, admission: Admission, threads: int, name: str = "model") -> None:
        self._admission = admission
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """``function(*args, **kwargs)`` in the pool.

        When the caller gives up, a call that runs stays watched until it returns: it holds its thread, and a hang must
        show. One that still waits for a thread never runs.
        """
        return await asyncio.wrap_future(self._pool.submit(self._watched, partial(function, *args, **kwargs)))

    def _watched(self, call: Callable[[], R]) -> R:
        with self._admission.calling():
            return call()

    async def sleep(self, seconds: float) -> None:
        """Compute time that is only waited for (fault knobs, remote models): watched as a call is."""
        with self._admission.calling():
            await asyncio.sleep(seconds)

    def stop(self) -> None:
        """Let running calls finish and refuse new ones."""
        self._pool.shutdown(wait=False, cancel_futures=True)
