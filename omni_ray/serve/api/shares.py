"""How much sound each API key was given lately and is being given now: what fair sharing within a priority goes by."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from omni_ray.serve.api.keys import ANONYMOUS

HALF_LIFE_S: Final = 60.0
"""What was served loses half of its weight in this time, so that yesterday's load costs nobody today."""
FIRST_GUESS_S: Final = 5.0

Spoken = Callable[[], float]


class Shares:
    """Ranks requests by key: of two keys, the next place is for the one that had less sound.

    A request under way counts before it is answered, with its sound so far and at least what an answer usually has:
    else a flood would come in whole at the rank of its first request. A key that was idle starts where the least served
    busy key stands: nobody saves up, and nobody else waits until a newcomer has caught up.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._served: dict[str, tuple[float, float]] = {}
        self._under_way: dict[str, list[Spoken]] = {}
        self._usual_s = FIRST_GUESS_S

    def of(self, key: str) -> float:
        """Seconds of sound that ``key`` was given lately, answers under way left out."""
        seconds, at = self._served.get(key, (0.0, 0.0))
        return seconds * math.exp2((at - self._clock()) / HALF_LIFE_S) if seconds else 0.0

    @contextmanager
    def share(self, key: str, spoken: Spoken) -> Iterator[float]:
        """Gives the request's rank, smaller being served first, and counts it until the block ends.

        Args:
            key: the name of the request's key. Anonymous clients are all the same one: rank 0.
            spoken: seconds of sound sent so far.
        """
        if key == ANONYMOUS:
            yield 0.0
            return
        if key not in self._under_way and self._under_way:
            self._serve(key, max(0.0, min(map(self.of, self._under_way)) - self.of(key)))
        mine = self._under_way.setdefault(key, [])
        rank = self.of(key) + sum(max(self._usual_s, other()) for other in mine)
        mine.append(spoken)
        try:
            yield rank
        finally:
            mine.remove(spoken)
            if not mine:
                del self._under_way[key]
            if seconds := spoken():
                self._serve(key, seconds)
                self._usual_s += 0.1 * (seconds - self._usual_s)

    def _serve(self, key: str, seconds: float) -> None:
        self._served[key] = (self.of(key) + seconds, self._clock())
