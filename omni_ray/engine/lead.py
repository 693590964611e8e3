"""How far a stream is ahead of its listener: whose work comes first, and what may go out together with what follows."""

import time
from collections.abc import Callable
from typing import Final, TypeAlias

from omni_ray.engine.types import Request

AHEAD_S: Final = 0.5
"""With so much sound in hand a listener does not notice that others are served first."""

HELD_PART: Final = 1 / 8
"""What is held back is at most this part of the lead, so that it is out long before anybody could miss it."""
MOST_HELD_S: Final = 1.0

Urgency: TypeAlias = tuple[bool, int, float, bool, float]
"""Smaller is more urgent; only to be compared."""


class Lead:
    """One request's lead in one stage: seconds of sound it emitted, minus the seconds since it emitted the first.

    A listener who started to play at the first chunk hears a gap when it falls below zero.
    """

    def __init__(self, request: Request, clock: Callable[[], float] = time.monotonic) -> None:
        self._turn = (request.priority, request.served_s)
        self._clock = clock
        self._arrived = clock()
        self._first: float | None = None
        self._emitted_s = 0.0

    def emitted(self, seconds: float) -> None:
        """So much sound has been emitted in all, by the position of its end."""
        if self._first is None:
            self._first = self._clock()
        self._emitted_s = seconds

    def seconds(self) -> float | None:
        """The lead; None before the first chunk, and for a stage that makes no sound."""
        return None if self._first is None else self._emitted_s - (self._clock() - self._first)

    def ahead(self) -> bool:
        """Whether its next chunk can wait for somebody else's first one."""
        lead = self.seconds()
        return lead is not None and lead >= AHEAD_S

    def may_hold(self, seconds: float) -> bool:
        """Whether so much sound may wait for more to go out with: a message per frame would cost more than the frame.

        Who holds sound back asks again with each step, as the lead melts.
        """
        lead = self.seconds()
        return lead is not None and seconds <= min(MOST_HELD_S, lead * HELD_PART)

    def urgency(self) -> Urgency:
        """The order of work.

        First whoever is not ``ahead``: by priority, then by what the request's key was served, as in the line for a
        place; of those who are equal so far, whoever is about to hear a gap, the worst first, then those who have heard
        nothing yet, as they came. After them those who are ahead, in the same way.
        """
        lead = self.seconds()
        if lead is None:
            return (False, *self._turn, True, self._arrived)
        return (lead >= AHEAD_S, *self._turn, False, lead)
