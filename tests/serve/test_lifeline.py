"""The lifeline over real sockets: a consumer that dies, however it dies, is noticed within a second."""

import asyncio
import errno
import os
import signal
import sys
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_ray.config.deploy import StreamingConfig
from omni_ray.engine.types import LatentChunk
from omni_ray.errors import ReplicaDiedError, StageSilentError
from omni_ray.serve import lifeline
from omni_ray.serve.events import Event, LifelineAddress, OutputEvent
from omni_ray.serve.lifeline import ConsumerEnd, LifelineHost, ProducerEnd
from omni_ray.serve.meters import Labels
from omni_ray.serve.stage_client import Client, Received

HOST = "127.0.0.1"
NO_RAYLET = 1
"""A port where nobody listens."""
ROOT = Path(__file__).resolve().parents[2]

CONSUMER = """
import asyncio
from omni_ray.serve.lifeline import LifelineHost
async def main():
    async with LifelineHost("127.0.0.1", 1).open() as end:
        print(end.address.port, end.address.token, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


async def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the other end's state is polled
            await asyncio.sleep(0.002)


@asynccontextmanager
async def following(address: LifelineAddress, window_bytes: int = 1000) -> AsyncIterator[ProducerEnd]:
    """A producer's end that follows ``address`` while the body runs."""
    producer = ProducerEnd(window_bytes)
    task = asyncio.ensure_future(producer.follow(address))
    try:
        yield producer
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def host():
    made = LifelineHost(HOST, NO_RAYLET)
    yield made
    await made.stop()


def attached(end: ConsumerEnd) -> bool:
    return end._writer is not None


async def test_lives_as_long_as_the_stream(host: LifelineHost):
    async with host.open() as end, following(end.address) as producer:
        await until(lambda: attached(end))
        await asyncio.sleep(0.05)
        assert not producer.lost.done()


async def test_end_of_the_stream_is_seen(host: LifelineHost):
    async with host.open() as end:
        producer = ProducerEnd(1000)
        task = asyncio.ensure_future(producer.follow(end.address))
        await until(lambda: attached(end))
    await asyncio.wait_for(producer.lost, 5)
    await asyncio.wait_for(task, 5)
    assert host._ends == {}


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_killed_consumer_is_noticed_within_a_second(number: int):
    """On the actor path a killed consumer left the producer computing to its end (measured); this is its cure.

    It takes some milliseconds; a busy machine has ten seconds for it.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CONSUMER, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        port, token = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()
        async with following(LifelineAddress(HOST, int(port), token, NO_RAYLET)) as producer:
            await asyncio.sleep(0.1)
            assert not producer.lost.done()
            os.kill(process.pid, number)
            await asyncio.wait_for(asyncio.shield(producer.lost), 10)
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
        await process.wait()


async def test_stopped_consumer_is_not_lost():
    """A consumer that only pauses (a long garbage collection, a debugger) keeps its stream."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CONSUMER, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    try:
        assert process.stdout is not None
        port, token = (await asyncio.wait_for(process.stdout.readline(), 60)).decode().split()
        async with following(LifelineAddress(HOST, int(port), token, NO_RAYLET)) as producer:
            await asyncio.sleep(0.05)
            os.kill(process.pid, signal.SIGSTOP)
            await asyncio.sleep(0.3)
            assert not producer.lost.done()
    finally:
        process.kill()
        await process.wait()


class TestStrangers:
    """Whoever knocks without this stream's token."""

    @pytest.mark.parametrize("token", ["0" * 32, "f" * 64, "x"])
    async def test_wrong_token_is_cut_off(self, host: LifelineHost, token: str):
        async with host.open() as end:
            producer = ProducerEnd(1000)
            wrong = LifelineAddress(HOST, end.address.port, token, NO_RAYLET)
            task = asyncio.ensure_future(producer.follow(wrong))
            if len(token) < 32:  # it never completes a token: cut after the connect timeout, or when it leaves
                await asyncio.sleep(0.05)
                assert not attached(end)
                task.cancel()
                return
            await asyncio.wait_for(producer.lost, 5)
            assert not attached(end)

    async def test_late_connect(self, host: LifelineHost):
        """The stream ended before its producer came: the producer is told at once, not after a timeout."""
        async with host.open():
            async with host.open() as end:
                late = end.address
            async with following(late) as producer:
                await asyncio.wait_for(producer.lost, 5)

    async def test_nobody_listens(self, unused_tcp_port: int):
        async with following(LifelineAddress(HOST, unused_tcp_port, "0" * 32, NO_RAYLET)) as producer:
            await asyncio.wait_for(producer.lost, 5)

    async def test_one_streams_end_leaves_the_others(self, host: LifelineHost):
        async with host.open() as kept, following(kept.address) as alive:
            async with host.open() as ended, following(ended.address) as gone:
                await until(lambda: attached(kept) and attached(ended))
                assert kept.address.token != ended.address.token
                ended.close()
                await asyncio.wait_for(gone.lost, 5)
            assert not alive.lost.done()


class TestWindow:
    """Unread latents of one stream are bounded."""

    async def test_blocks_and_resumes(self, host: LifelineHost):
        async with host.open() as end, following(end.address, window_bytes=100) as producer:
            await producer.acquire(60)
            await producer.acquire(40)
            blocked = asyncio.ensure_future(producer.acquire(1))
            await asyncio.sleep(0.03)
            assert not blocked.done()
            end.arrived(60).read()
            await asyncio.wait_for(blocked, 5)

    async def test_small_credits_add_up(self, host: LifelineHost):
        async with host.open() as end, following(end.address, window_bytes=100) as producer:
            await producer.acquire(100)
            blocked = asyncio.ensure_future(producer.acquire(50))
            await until(lambda: attached(end))
            for _ in range(4):
                end.arrived(10).read()
            await asyncio.sleep(0.03)
            assert not blocked.done()
            end.arrived(10).read()
            await asyncio.wait_for(blocked, 5)

    async def test_an_item_larger_than_the_window_passes_alone(self, host: LifelineHost):
        async with host.open() as end, following(end.address, window_bytes=100) as producer:
            await asyncio.wait_for(producer.acquire(1_000_000), 5)
            blocked = asyncio.ensure_future(producer.acquire(1))
            await asyncio.sleep(0.02)
            assert not blocked.done()
            end.arrived(1_000_000).read()
            await asyncio.wait_for(blocked, 5)

    async def test_credit_before_the_producer_connects(self, host: LifelineHost):
        """The first events may be read before the lifeline is up: nothing of that may be forgotten."""
        async with host.open() as end:
            end.arrived(100).read()
            async with following(end.address, window_bytes=100) as producer:
                await producer.acquire(100)
                await asyncio.wait_for(producer.acquire(100), 5)

    async def test_many_megabytes(self, host: LifelineHost):
        """More than 2**32 bytes over a long stream: the count must not wrap."""
        big = 2**31
        async with host.open() as end, following(end.address, window_bytes=2 * big) as producer:
            for _ in range(5):
                await asyncio.wait_for(producer.acquire(big), 5)
                end.arrived(big).read()


class TestHeld:
    """Ray frees an object that its owner dropped, whoever else has a ref to it; so refs are held until read."""

    async def test_until_read_in_any_order(self, host: LifelineHost):
        async with host.open() as end, following(end.address) as producer:
            refs = [Ref() for _ in range(3)]
            alive = [weakref.ref(ref) for ref in refs]
            latents = []
            for ref in refs:
                producer.note(10)
                producer.hold(ref, 10)
                latents.append(end.arrived(10))
            del refs, ref
            latents[1].read()
            await asyncio.sleep(0.03)
            assert all(known() is not None for known in alive), "the first one is not read yet"
            latents[0].read()
            await until(lambda: alive[0]() is None and alive[1]() is None)
            assert alive[2]() is not None
            producer.release()
            assert alive[2]() is None


class Ref:
    """Stands for an object ref: something that can be known weakly."""


class TestDrained:
    """A stream ends only when its refs are read: they die with the producer, which may leave once it has no streams."""

    async def test_waits_for_the_last_read(self, host: LifelineHost):
        async with host.open() as end, following(end.address) as producer:
            await asyncio.wait_for(producer.drained(), 5)
            producer.note(100)
            draining = asyncio.ensure_future(producer.drained())
            end.arrived(60).read()
            await asyncio.sleep(0.03)
            assert not draining.done()
            end.arrived(40).read()
            await asyncio.wait_for(draining, 5)

    async def test_waits_for_the_last_message(self, host: LifelineHost):
        """Ray would block the producer's whole process until a frozen consumer has confirmed it."""
        async with host.open() as end, following(end.address) as producer:
            producer.message()
            producer.message()
            ending, failing = (asyncio.ensure_future(wait()) for wait in (producer.drained, producer.taken))
            end.took()
            await asyncio.sleep(0.03)
            assert not ending.done()
            assert not failing.done()
            end.took()
            await asyncio.wait_for(asyncio.gather(ending, failing), 5)

    async def test_ends_with_the_consumer(self, host: LifelineHost):
        async with host.open() as end, following(end.address) as producer:
            producer.note(100)
            draining = asyncio.ensure_future(producer.drained())
            await until(lambda: attached(end))
            end.close()
            await asyncio.wait_for(draining, 5)


class Fed(Client):
    """A client whose messages come from a generator; their latents count in a real lifeline."""

    async def stream(self, envelope: Any, trace: Any = None) -> AsyncGenerator[Received, None]:
        raise NotImplementedError
        yield

    def _latent_bytes(self, event: OutputEvent) -> int:
        return event.ref_bytes

    def of(self, batches: AsyncIterator[list[Event]], end: ConsumerEnd) -> AsyncGenerator[Received, None]:
        return self._events(batches, end, None)


class TestSilence:
    """A producer that waits until its latents were read sends nothing meanwhile: that is the reader's silence."""

    @pytest.mark.parametrize(("read_every_s", "heard"), [(0.15, True), (60, False)])
    async def test_whose_it_is(self, virtual_time: None, host: LifelineHost, read_every_s: float, heard: bool):
        streaming = StreamingConfig(first_chunk_timeout_s=5, idle_timeout_s=0.6)
        client = Fed("thinker", Labels("app", "ramp", "talker", "-"), streaming)
        got: list[Received] = []
        async with host.open() as end, following(end.address) as producer:

            async def messages() -> AsyncIterator[list[Event]]:
                for _ in range(8):
                    producer.note(100)
                    producer.message()
                    yield [
                        OutputEvent("thinker", LatentChunk(0, np.zeros((0, 1), np.float32)), ref=Ref(), ref_bytes=100)
                    ]
                await producer.drained()

            async def collect() -> None:
                async with aclosing(client.of(messages(), end)) as events:
                    async for received in events:
                        got.append(received)

            async def read() -> None:
                for k in range(8):
                    await asyncio.sleep(read_every_s)
                    got[k].read()

            reading = asyncio.ensure_future(read())
            if heard:
                await asyncio.wait_for(asyncio.gather(collect(), reading), 20)
            else:
                with pytest.raises(StageSilentError):
                    await asyncio.wait_for(collect(), 20)
                reading.cancel()
        assert len(got) == 8


class TestParted:
    """Ray would block the producer's whole process while it asks a consumer that is gone what it has taken."""

    async def test_a_vanished_host(self, virtual_time: None, host: LifelineHost, monkeypatch: pytest.MonkeyPatch):
        """The kernel's word for unanswered keepalives is given by hand; in ``benchmarks/lost_host.py`` it comes."""
        monkeypatch.setattr(lifeline, "RAY_GIVES_UP_S", 0.2)
        readers: list[asyncio.StreamReader] = []
        connect = asyncio.open_connection

        async def connected(*where: Any) -> Any:
            reader, writer = await connect(*where)
            readers.append(reader)
            return reader, writer

        monkeypatch.setattr(asyncio, "open_connection", connected)
        async with host.open() as end, following(end.address) as producer:
            await until(lambda: attached(end))
            producer.message()
            await host.stop()
            readers[0].set_exception(TimeoutError(errno.ETIMEDOUT, "Connection timed out"))
            await asyncio.wait_for(producer.drained(), 1)
            began = time.monotonic()
            assert await producer.parted()
            assert time.monotonic() - began > 0.15

    async def test_a_consumer_that_lives(self, virtual_time: None, host: LifelineHost):
        """It only left, confirms to Ray what comes, and is told."""
        async with host.open() as end, following(end.address) as producer:
            await until(lambda: attached(end))
            producer.message()
            end.close()
            await asyncio.wait_for(producer.drained(), 1)
            with pytest.raises(ReplicaDiedError):
                async with asyncio.timeout(2), producer.parting():
                    raise ReplicaDiedError("the lifeline alone is gone")

    @pytest.mark.parametrize(("node_lives", "waits_s"), [(True, 0.3), (False, 0.7)])
    async def test_a_process_that_died(
        self, virtual_time: None, monkeypatch: pytest.MonkeyPatch, node_lives: bool, waits_s: float
    ):
        """Its node tells Ray so, if that has not died with it. No error is sent after it: nobody would confirm that."""
        monkeypatch.setattr(lifeline, "EXIT_S", 0.1)
        monkeypatch.setattr(lifeline, "RAY_DROPS_PROCESS_S", 0.2)
        monkeypatch.setattr(lifeline, "RAY_DROPS_NODE_S", 0.4)
        raylet = await asyncio.start_server(lambda _, writer: writer.close(), HOST, 0)
        died = LifelineHost(HOST, raylet.sockets[0].getsockname()[1])
        if not node_lives:
            raylet.close()
        async with raylet, died.open() as end, following(end.address) as producer:
            await until(lambda: attached(end))
            end.close()
            await asyncio.wait_for(producer.lost, 1)
            asyncio.get_running_loop().call_later(0.02, died._server.close)  # the last socket that closes
            began = time.monotonic()
            async with producer.parting():
                raise ReplicaDiedError("gone")
            assert time.monotonic() - began == pytest.approx(waits_s)


async def test_many_streams_share_one_socket(host: LifelineHost):
    async def stream() -> int:
        async with host.open() as end, following(end.address) as producer:
            await until(lambda: attached(end))
            assert not producer.lost.done()
            return end.address.port

    assert len(set(await asyncio.gather(*(stream() for _ in range(50))))) == 1
    assert host._ends == {}


async def test_stop_before_any_stream():
    await LifelineHost(HOST, NO_RAYLET).stop()
