"""What work costs the CPU, in units of other work done just then: a slow or busy machine is slow at both."""

import gc
import json
import time
from types import TracebackType

_PARTS = json.dumps([{"type": "text", "text": "x"}] * 10_000)


class Bill:
    """``with Bill() as bill``: what this process does there costs ``bill.units``; 1 is to read 10,000 small objects.

    Python's collector leaves alone what was there before, as in a replica that has started: the heap of a test run is
    large, and a full collection of it, half a second, comes to whoever allocates next.
    """

    def __enter__(self) -> "Bill":
        self._unit = _unit()
        self._started = time.process_time()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, where: TracebackType | None) -> None:
        took = time.process_time() - self._started
        self.units = took / max(self._unit, _unit())
        gc.unfreeze()


def _unit() -> float:
    gc.freeze()
    started = time.thread_time()  # not the process's: another thread may still work at what the bill was for
    json.loads(_PARTS)
    return time.thread_time() - started
