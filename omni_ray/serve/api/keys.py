"""API keys: who may ask, and how much sound each key was given lately (fair sharing)."""

import hmac
import math
import time
from collections.abc import Callable

from omni_ray.errors import AuthenticationError

HALF_LIFE_S = 60.0
ANONYMOUS = ""


class ApiKeys:
    """Checks ``Authorization: Bearer``. Without configured keys every header is accepted and ignored."""

    def __init__(self, keys: frozenset[str]) -> None:
        self._keys = {key: key.encode() for key in keys}

    def check(self, token: str | None) -> str:
        """The key the client presented, or ``ANONYMOUS`` where none is asked for.

        Raises:
            AuthenticationError: missing or unknown. Every key is compared, in constant time each.
        """
        if not self._keys:
            return ANONYMOUS
        if not token:
            raise AuthenticationError("an API key is required: send 'Authorization: Bearer KEY'")
        presented = token.encode("latin-1", "replace")
        found = [key for key, known in self._keys.items() if hmac.compare_digest(presented, known)]
        if not found:
            raise AuthenticationError("the API key is unknown")
        return found[0]


class ServedSeconds:
    """Audio seconds given to each key, halved every ``HALF_LIFE_S``, so that yesterday's load costs nobody today."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._served: dict[str, tuple[float, float]] = {}

    def of(self, key: str) -> float:
        """What ``key`` was given lately; 0 for anonymous clients, who are all the same."""
        seconds, at = self._served.get(key, (0.0, 0.0))
        return seconds * math.exp2((at - self._clock()) / HALF_LIFE_S) if seconds else 0.0

    def add(self, key: str, seconds: float) -> None:
        """Counts ``seconds`` of sound for ``key``."""
        if key != ANONYMOUS and seconds:
            self._served[key] = (self.of(key) + seconds, self._clock())
