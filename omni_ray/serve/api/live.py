"""From a generator to an HTTP answer: first event before status line, client gone means stopped, heartbeats, aborts.

    opened(dispatcher.stream(...)) -> answer generator: Head, bytes, bytes, ... -> LiveResponse -> client

Everything an answer holds (the stream, an encoder) is opened and closed inside its generator, which runs in one task
from its first step to its close.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from omni_ray.config.ingress import IngressConfig
from omni_ray.errors import SlowReaderError, StageFailedError
from omni_ray.serve.api import sse
from omni_ray.serve.api.errors import error_body, public_error
from omni_ray.serve.api.request_log import AbortedResponse, RequestInfo
from omni_ray.serve.events import OutputEvent

HEARTBEAT_S = 15.0
BLOCK_BYTES = 65_536


@dataclass(frozen=True, slots=True)
class Head:
    """Everything before the body. ``heartbeat``: comment lines may be put between pieces (SSE)."""

    content_type: str
    headers: Mapping[str, str] = field(default_factory=dict)
    heartbeat: bool = False


Answer = AsyncGenerator[Head | bytes, None]
"""One ``Head``, then pieces of the body. An error before the head becomes a status; after it, a cut connection."""


class _Resumed:
    """A stream whose first event was already taken."""

    def __init__(self, first: OutputEvent, rest: AsyncIterator[OutputEvent]) -> None:
        self._first: OutputEvent | None = first
        self._rest = rest

    def __aiter__(self) -> AsyncIterator[OutputEvent]:
        return self

    async def __anext__(self) -> OutputEvent:
        if self._first is not None:
            first, self._first = self._first, None
            return first
        return await anext(self._rest)


@contextlib.asynccontextmanager
async def opened(events: AsyncGenerator[OutputEvent, None]) -> AsyncIterator[AsyncIterator[OutputEvent]]:
    """Waits for the first event, so that an error before it still decides the status; closes the stream at the end."""
    async with contextlib.aclosing(events):
        try:
            first = await anext(events)
        except StopAsyncIteration:
            raise StageFailedError("the pipeline ended without any output") from None
        yield _Resumed(first, events)


def failed(route: sse.Route, error: Exception, info: RequestInfo) -> bytes:
    """The last event of a stream whose status line was sent before ``error``; notes it as the request's outcome."""
    info.outcome = type(error).__name__
    return sse.failure(route, error_body(public_error(error, info.request_id)))


class LiveResponse(Response):
    """Sends an ``Answer`` and closes it, whatever ends it first: its end, an error, the client, a cancellation."""

    def __init__(self, answer: Answer, info: RequestInfo, config: IngressConfig) -> None:
        super().__init__()
        self._answer = answer
        self._info = info
        self._timeout_s = config.send_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102 - ASGI
        work = asyncio.create_task(self._deliver(send))
        gone = asyncio.create_task(_until_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                self._info.outcome = "disconnected"
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)

    async def _deliver(self, send: Send) -> None:
        async with contextlib.aclosing(self._answer) as answer:
            head = await anext(answer)
            assert isinstance(head, Head)
            raw = {"content-type": head.content_type, **head.headers}
            headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in raw.items()]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            writer = _Writer(send, self._timeout_s)
            pings = asyncio.create_task(writer.ping()) if head.heartbeat else None
            try:
                async for piece in answer:
                    assert isinstance(piece, bytes)
                    await writer.write(piece)
                await writer.end()
            except ClientDisconnect:
                raise
            except Exception as error:
                self._info.outcome = type(error).__name__
                raise AbortedResponse(public_error(error, self._info.request_id).message) from error
            finally:
                if pings is not None:
                    pings.cancel()
                    await asyncio.gather(pings, return_exceptions=True)


class _Writer:
    """Sends pieces, and comment lines while there are none.

    Where the server sees that the client does not read, a send waits: so the stream is braked, and given up after
    ``timeout_s`` (C37). What its stages make meanwhile waits in them. A long piece goes out in blocks: a client that
    takes some is not stalled.
    """

    def __init__(self, send: Send, timeout_s: float) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._lock = asyncio.Lock()
        self._sent_at = asyncio.get_running_loop().time()

    async def write(self, piece: bytes) -> None:
        async with self._lock:  # of the whole piece: a comment line inside an event would break it
            for start in range(0, len(piece), BLOCK_BYTES):
                await self._body(piece[start : start + BLOCK_BYTES], more=True)

    async def end(self) -> None:
        async with self._lock:
            await self._body(b"", more=False)

    async def _body(self, piece: bytes, more: bool) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._send({"type": "http.response.body", "body": piece, "more_body": more})
        except TimeoutError:
            raise SlowReaderError(f"the client took nothing for {self._timeout_s:g} s") from None
        except OSError as error:
            raise ClientDisconnect() from error
        self._sent_at = asyncio.get_running_loop().time()

    async def ping(self) -> None:
        while True:
            left = self._sent_at + HEARTBEAT_S - asyncio.get_running_loop().time()
            if left > 0:
                await asyncio.sleep(left)
            elif self._lock.locked():
                async with self._lock:
                    pass  # a piece is on its way, which says more than a comment
            else:
                await self.write(sse.PING)


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
