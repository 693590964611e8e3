"""Frees object refs that a failed or cancelled stream leaves in reference cycles.

An exception's traceback keeps frames alive, frames keep events, events keep refs, and a ref keeps its object in the
store of the cluster. Python's collector would break such cycles at some later time, in an idle process never. So a
stage asks for a collection soon after a ref-carrying stream ended badly. What lived before traffic is frozen first,
so that a collection only looks at what requests made and takes milliseconds.
"""

import asyncio
import gc

DELAY_S = 0.5
"""Streams that end together are cleaned up together; frames of the failing call are gone by then."""


class RefCollector:
    """At most one collection per ``DELAY_S``, on the event loop that asked."""

    def __init__(self) -> None:
        self._pending: asyncio.TimerHandle | None = None

    def freeze(self) -> None:
        """Everything that exists now is there to stay."""
        gc.collect()
        gc.freeze()

    def soon(self) -> None:
        """A ref-carrying stream ended badly."""
        if self._pending is None:
            self._pending = asyncio.get_running_loop().call_later(DELAY_S, self._collect)

    def _collect(self) -> None:
        self._pending = None
        gc.collect()
