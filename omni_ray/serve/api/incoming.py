"""A request's body as it arrives: under a size limit, a deadline, and one bound on all bodies of this replica."""

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Iterator

from starlette.requests import Request

from omni_ray.config.ingress import IngressConfig
from omni_ray.errors import BodyTimeoutError, PayloadTooLargeError, SaturatedError
from omni_ray.serve.api.request_log import info_of

MB = 2**20
_SLOWEST_BYTES_PER_S = 10_000


class Bodies:
    """All bodies that this replica reads or decodes right now.

    Attributes:
        held: their bytes.
        media_held: bytes of all decoded media of requests that are not over: a small file may hold a large picture.
        decoding: held while one medium is decoded, so that many do not take the threads that encode live streams.
    """

    def __init__(self, config: IngressConfig) -> None:
        self.config = config
        self.held = 0
        self.media_held = 0
        self.decoding = asyncio.Semaphore(max(2, (os.cpu_count() or 2) // 2))
        self._most = int(max(config.max_bodies_mb, config.max_body_mb) * MB)

    @contextlib.contextmanager
    def receive(self, request: Request) -> Iterator["Body"]:
        """The body of ``request``. Its bytes count until the block ends, so its media are decoded inside."""
        body = Body(request, self)
        try:
            yield body
        finally:
            self.held -= body.size

    @contextlib.contextmanager
    def keep_media(self, size: int) -> Iterator[None]:
        """Counts ``size`` bytes of decoded media until the block ends; ``SaturatedError`` if they are too many."""
        if self.media_held + size > self.config.max_media_mb * MB:
            raise SaturatedError(f"this server already holds {self.media_held // MB} MB of decoded media")
        self.media_held += size
        try:
            yield
        finally:
            self.media_held -= size

    def add(self, size: int) -> None:
        """Counts ``size`` more bytes; ``SaturatedError`` if they are too many."""
        if self.held + size > self._most:
            raise SaturatedError(f"this server already reads {self.held // MB} MB of request bodies")
        self.held += size


class Body:
    """One request's body.

    Attributes:
        content_type: without parameters, lower case.
        size: bytes that arrived so far, or were fetched for it.
        info: the request's.
    """

    def __init__(self, request: Request, bodies: Bodies) -> None:
        self.headers = request.headers
        self.content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        self.size = 0
        self.info = info_of(request)
        self._request = request
        self._bodies = bodies
        self._limit = int(bodies.config.max_body_mb * MB)

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        """What arrives.

        Raises:
            PayloadTooLargeError: as soon as the limit is passed, declared or not.
            BodyTimeoutError: nothing came for ``body_idle_timeout_s``, or all of it came too slowly (C55).
            SaturatedError: all bodies together are too large.
        """
        config = self._bodies.config
        declared = self.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._limit:
            raise self._too_large()
        loop = asyncio.get_running_loop()
        started = loop.time()
        async with contextlib.aclosing(self._request.stream()) as pieces:
            while True:
                since = min(loop.time(), started + self.size / _SLOWEST_BYTES_PER_S)
                try:
                    async with asyncio.timeout_at(since + config.body_idle_timeout_s):
                        piece = await anext(pieces)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise BodyTimeoutError(
                        f"the body stopped after {self.size} bytes, or came more slowly than 10 kB/s"
                    ) from None
                self.add(len(piece))
                yield piece

    def add(self, size: int) -> None:
        """Counts ``size`` more bytes that the request brought, or that were fetched for it.

        Raises:
            PayloadTooLargeError: more than one request may hold.
            SaturatedError: more than all may hold together.
        """
        if self.size + size > self._limit:
            raise self._too_large()
        self._bodies.add(size)
        self.size += size

    def _too_large(self) -> PayloadTooLargeError:
        most = self._bodies.config.max_body_mb
        return PayloadTooLargeError(f"the body, and the media it names, exceed the limit of {most:g} MB")
