"""How long a replica works for one second of sound, whatever its engine batches: what a stage's streams cost it."""

import math
import time
from collections.abc import Callable
from typing import Final

MEMORY_S: Final = 5.0
"""Work and sound of so long ago count for about a third."""


class Effort:
    """Work and sound of one replica.

    A run works while its engine has something to do for it; while the engine waits for what comes from upstream, the
    run rests. The replica works while any of its runs does, so what is computed together is counted once.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._at_work: set[object] = set()
        self._seen = clock()
        self._work_s = 0.0
        self._sound_s = 0.0

    def works(self, run: object) -> None:
        """The engine has something to do for ``run``."""
        self._look()
        self._at_work.add(run)

    def rests(self, run: object) -> None:
        """``run`` waits for upstream, or is over."""
        self._look()
        self._at_work.discard(run)

    def at_work(self, run: object) -> bool:
        """Whether ``run`` waits for this stage."""
        return run in self._at_work

    def sounded(self, seconds: float) -> None:
        """So much sound was made."""
        self._look()
        self._sound_s += seconds

    def cost(self) -> float:
        """Seconds of work for a second of sound, lately; 0 if there was none."""
        self._look()
        return self._work_s / self._sound_s if self._sound_s > 1e-6 else 0.0

    def _look(self) -> None:
        """Let what was fade, and add the time since the last look."""
        now = self._clock()
        passed, self._seen = now - self._seen, now
        kept = math.exp(-passed / MEMORY_S)
        self._sound_s *= kept
        self._work_s *= kept
        if self._at_work:
            self._work_s += MEMORY_S * (1 - kept)
