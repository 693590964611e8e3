"""Who is let in, before the body is read: a place in the server, and within the limits of the request's API key."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from omni_ray.config.ingress import IngressConfig, KeyLimits
from omni_ray.errors import RateLimitedError
from omni_ray.serve.api.keys import ANONYMOUS

_WINDOW_S = 60.0


@dataclass(slots=True)
class _Bucket:
    """Requests that a key may still make at once; it fills up again in a minute."""

    left: float
    at: float


class Gate:
    """Limits of each key, divided by the number of ingress replicas, because no replica knows what the others let in.

    Where there are several keys, none may hold more than three quarters of a replica's places, whatever the limits say.
    """

    def __init__(
        self,
        config: IngressConfig,
        keys: Sequence[str],
        replicas: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._replicas = replicas
        self._clock = clock
        self._fair = max(1, config.max_concurrent_requests * 3 // 4) if len(keys) > 1 else None
        self._inside: Counter[str] = Counter()
        self._buckets: dict[str, _Bucket] = {}

    @contextmanager
    def passed(self, key: str) -> Iterator[None]:
        """Count a request of ``key`` until the block ends.

        Raises:
            RateLimitedError: the key has as many requests under way, or made as many in the last minute, as it may.
        """
        if key == ANONYMOUS:
            yield
            return
        limits = self._config.limits_of(key)
        most = min((m for m in (self._share(limits.concurrent_requests), self._fair) if m is not None), default=None)
        if most is not None and self._inside[key] >= most:
            raise RateLimitedError(f"this API key has {self._inside[key]} requests under way, as many as it may")
        self._take_one(key, limits)
        self._inside[key] += 1
        try:
            yield
        finally:
            self._inside[key] -= 1

    def _take_one(self, key: str, limits: KeyLimits) -> None:
        most = self._share(limits.requests_per_minute)
        if most is None:
            return
        now = self._clock()
        bucket = self._buckets.setdefault(key, _Bucket(most, now))
        bucket.left = min(most, bucket.left + (now - bucket.at) * most / _WINDOW_S)
        bucket.at = now
        if bucket.left < 1:
            raise RateLimitedError(
                f"this API key may make {limits.requests_per_minute} requests per minute",
                retry_after_s=math.ceil((1 - bucket.left) * _WINDOW_S / most),
            )
        bucket.left -= 1

    def _share(self, limit: int | None) -> int | None:
        return None if limit is None else math.ceil(limit / self._replicas)
