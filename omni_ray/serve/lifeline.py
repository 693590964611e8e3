"""The lifeline of a stream on the actor path: the producer notices within a second that its consumer is gone.

Serve's gRPC transport cancels a producer whose consumer dies; the actor path, which object refs need, lets it run to
its end. So the consumer of such a stream listens on a socket, the producer connects for as long as the stream lives,
and the kernel closes the connection when the consumer's process dies, however it dies. Nothing is routed, so it also
holds on a draining replica. The same connection carries the window: the consumer reports the latent bytes it has
read, and the producer waits while too many are unread.

The report also keeps latents alive. Ray frees an object whose owner has dropped it although a ref to it, nested in an
item of a stream, waits unread in another process (ReferenceCountingAssertionError: 46 of 60 refs read 50 ms late on one
raylet, 10 of 60 read at once from another one; Ray 2.60). So the producer holds every ref until it was read.

And it counts messages: Ray ends a stream by blocking the producer's event loop until the consumer's process has
confirmed every item (WaitAllObjectsReported; Ray 2.60), so one frozen consumer would freeze all other streams of its
producer. A stream therefore ends only when its consumer has taken all of it. One whose consumer is gone is done with,
but stays open until Ray has given that up too: ``ProducerEnd.parting``.
"""

import asyncio
import errno
import hmac
import secrets
import socket
import struct
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from omni_ray.errors import OmniRayError
from omni_ray.serve.events import LifelineAddress
from omni_ray.serve.window import Window

_CREDIT = struct.Struct("!QQ")  # bytes of latents read, messages taken
_CONNECT_TIMEOUT_S = 5.0
_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN)
EXIT_S = 0.5
"""The sockets of a process that is killed close one after the other: over 14 ms were seen."""
RAY_GIVES_UP_S = 600.0
"""Ray's connection to a host that vanished breaks after 120 s with something on its way, after 420 s without (gRPC)."""
RAY_DROPS_PROCESS_S = 8.0
"""Ray asks the node of a process 1, 3 and 7 s after their connection broke whether it lives."""
RAY_DROPS_NODE_S = 130.0
"""A node that answers nothing is called dead within 65 s, and Ray goes on to look after 15, 31, 63 and 123 s."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))


class Latent:
    """One latent that arrived as a ref and is to be read."""

    def __init__(self, end: "ConsumerEnd", nbytes: int) -> None:
        self.nbytes = nbytes
        self.is_read = False
        self._end = end

    def read(self) -> None:
        """It was used, or is not wanted: the producer may go on, and drop it."""
        self.is_read = True
        self._end.report()


class ConsumerEnd:
    """The consumer's end of one stream's lifeline."""

    def __init__(self, address: LifelineAddress) -> None:
        self.address = address
        self._writer: asyncio.StreamWriter | None = None
        self._unread: deque[Latent] = deque()
        self._read = 0
        self._taken = 0

    def attach(self, writer: asyncio.StreamWriter) -> None:
        """The producer connected."""
        self._writer = writer
        self.report()

    def arrived(self, nbytes: int) -> Latent:
        """A ref to a latent arrived, in the order of the stream."""
        latent = Latent(self, nbytes)
        self._unread.append(latent)
        return latent

    def took(self) -> None:
        """A message of the stream arrived."""
        self._taken += 1
        self.report()

    def report(self) -> None:
        """Report messages taken, and the bytes of all latents that were read and have none unread before them."""
        while self._unread and self._unread[0].is_read:
            self._read += self._unread.popleft().nbytes
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(_CREDIT.pack(self._read, self._taken))

    def close(self) -> None:
        """The stream is over."""
        if self._writer is not None:
            self._writer.close()


class LifelineHost:
    """Listens in a consumer's process, once for all its streams; the socket opens with the first stream."""

    def __init__(self, host: str, raylet_port: int) -> None:
        self._host = host
        self._raylet_port = raylet_port
        self._server: asyncio.Server | None = None
        self._opening = asyncio.Lock()
        self._ends: dict[str, ConsumerEnd] = {}

    @asynccontextmanager
    async def open(self) -> AsyncIterator[ConsumerEnd]:
        """A new stream's consumer end, closed with the body."""
        async with self._opening:
            if self._server is None:
                self._server = await asyncio.start_server(self._accept, self._host, 0)
        token = secrets.token_hex(16)
        port = self._server.sockets[0].getsockname()[1]
        end = ConsumerEnd(LifelineAddress(self._host, port, token, self._raylet_port))
        self._ends[token] = end
        try:
            yield end
        finally:
            del self._ends[token]
            end.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                given = await reader.readexactly(32)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            writer.close()
            return
        known = next((t for t in self._ends if hmac.compare_digest(t.encode(), given)), None)
        if known is None:
            writer.close()  # the stream ended before its producer came, or a stranger knocked
            return
        self._ends[known].attach(writer)

    async def stop(self) -> None:
        """Close the socket."""
        if self._server is not None:
            self._server.close()


class ProducerEnd(Window):
    """The producer's end: ``lost`` is done when the consumer is gone; ``acquire`` waits for window space."""

    def __init__(self, window_bytes: int) -> None:
        super().__init__(window_bytes)
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._messages = 0
        self._taken = 0
        self._out_of_reach = False
        self._broken: LifelineAddress | None = None
        self._held: deque[tuple[int, Any]] = deque()
        self._put = 0

    def message(self) -> None:
        """A message goes out."""
        self._messages += 1

    def hold(self, ref: Any, nbytes: int) -> None:
        """Keep ``ref``, which goes out next, until its ``nbytes`` are reported as read."""
        self._put += nbytes
        self._held.append((self._put, ref))

    def release(self) -> None:
        """The stream is over: keep no ref any longer."""
        self._held.clear()

    async def drained(self) -> None:
        """Wait until everything sent was taken and read, or the consumer is gone.

        A ref dies with the process that put it, and a leaving replica ends once it has no streams left: so a stream
        must not end while its consumer still has refs to read.
        """
        await self.taken()
        while self._sent > self._read and not self.lost.done():
            self._moved.clear()
            await self._moved.wait()

    async def taken(self) -> None:
        """Wait until every message was taken, or the consumer is gone; before that no stream may end, however."""
        while self._messages > self._taken and not self.lost.done():
            self._moved.clear()
            await self._moved.wait()

    @asynccontextmanager
    async def parting(self) -> AsyncIterator[None]:
        """The body is the stream; waits after it as ``parted`` does, and keeps the stream's error from a dead consumer.

        An error is one more message, which nobody would confirm (blocks of 4 s and 15 s were seen).
        """
        dead = False
        try:
            try:
                yield
            finally:
                dead = await self.parted()
        except OmniRayError:
            if not dead:
                raise

    async def parted(self) -> bool:
        """Wait, once all else of the stream is over, until Ray can end it without blocking this process.

        A consumer that lives and only left confirms what it got. For one that died its node answers Ray; if that is
        gone too, Ray repeats its question, ever more rarely, until it calls the node dead. Even where all was taken,
        the consumer's last word to Ray may have been lost.

        Returns:
            Whether the consumer's process is gone, or out of reach.
        """
        address = self._broken
        if address is None:
            return False
        if await _listens(address.host, address.port):
            await asyncio.sleep(EXIT_S)
            if await _listens(address.host, address.port):
                return False
        if self._out_of_reach:
            await asyncio.sleep(RAY_GIVES_UP_S)
        else:
            await asyncio.sleep(RAY_DROPS_PROCESS_S)
            if not await _listens(address.host, address.raylet_port):
                await asyncio.sleep(RAY_DROPS_NODE_S)
        return True

    async def follow(self, address: LifelineAddress) -> None:
        """Keep the connection until it breaks; then ``lost`` is done."""
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(address.host, address.port)
        except OSError as error:
            self._lose(address, error)
            return
        try:
            raw: socket.socket = writer.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEPALIVE:  # a node that vanished sends no FIN
                raw.setsockopt(socket.IPPROTO_TCP, option, value)
            writer.write(address.token.encode())
            while True:
                self._read, self._taken = _CREDIT.unpack(await reader.readexactly(_CREDIT.size))
                while self._held and self._held[0][0] <= self._read:
                    self._held.popleft()
                self._moved.set()
        except (OSError, asyncio.IncompleteReadError) as error:
            self._lose(address, error)
        finally:
            writer.close()

    def _lose(self, address: LifelineAddress, error: Exception) -> None:
        """A process that dies, however it dies, leaves a kernel that closes its sockets: that is no timeout."""
        self._broken = address
        self._out_of_reach = isinstance(error, TimeoutError) or (
            isinstance(error, OSError) and error.errno in _UNREACHABLE
        )
        if not self.lost.done():
            self.lost.set_result(None)
        self._moved.set()


async def _listens(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(_CONNECT_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True
