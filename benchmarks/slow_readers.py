"""Clients ask for five minutes of speech and hardly read (C37): what piles up where, and who notices.

    python benchmarks/slow_readers.py                   # Serve's own proxy
    python benchmarks/slow_readers.py --haproxy ours    # HAProxy mode with our settings, which shows us slow readers
    python benchmarks/slow_readers.py --haproxy serves  # with Serve's own, as far as they do not hide them

Prints a Markdown table: every few seconds the memory of each process (USS), the streams that are alive in the ingress
and in the codec, and how far the codec is ahead. Meanwhile another client asks for short speech, which must be exact.
At the end it reads what is still on the way to each reader: that is what the server had sent when it stopped.
"""

import argparse
import asyncio
import json
import os
import re
import socket
import statistics
import time
from collections import Counter
from contextlib import suppress

import haproxy_mode

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--haproxy", choices=haproxy_mode.WHOSE)
parser.add_argument("--readers", type=int, default=20)
parser.add_argument("--seconds", type=float, default=60)
parser.add_argument("--bytes-per-s", type=int, default=1000, help="that a reader takes; 0: nothing after the first")
parser.add_argument("--answer-mb", type=float, default=8, help="ingress.max_answer_mb")
given = parser.parse_args()
if given.haproxy:  # before Ray starts, on every node
    haproxy_mode.turn_on(os.environ, given.haproxy)

import httpx  # noqa: E402
import psutil  # noqa: E402
from ramp_client import ask  # noqa: E402
from ramp_cluster import RampCluster, deploy_config, ours, ramp_cluster  # noqa: E402

WORDS = 1250
SEND_TIMEOUT_S = 20.0
REST_S = 20.0
"""How long a reader then takes what is on its way."""
PROCESSES = re.compile(r"ray::(?:ServeReplica:ramp:(\w+)|(ProxyActor|HAProxyManager)).*|(?:\S*/)?(haproxy)")
COLUMNS = ("ProxyActor", "HAProxyManager", "haproxy", "ingress", "code2wav", "talker")


def config() -> dict[str, object]:
    """One replica of everything; the limits let five minutes pass, the longest speech of ``ramp``."""
    deploy = deploy_config()
    for stage in deploy["stages"].values():
        stage["deployment"] = {}
    deploy["ingress"] = {
        "grace_s": 5, "max_speech_chars": 20_000, "max_answer_mb": given.answer_mb,
        "send_timeout_s": SEND_TIMEOUT_S,
    }  # fmt: skip
    return deploy


def memory_mib() -> dict[str, float]:
    """USS of our processes that we look at, those of one name together."""
    out = dict.fromkeys(COLUMNS, 0.0)
    for process, title in ours():
        found = PROCESSES.fullmatch(title)
        name = next(filter(None, found.groups()), None) if found else None
        if name in out:
            with suppress(psutil.NoSuchProcess):
                out[name] += process.memory_full_info().uss / 2**20
    return out


class Reader:
    """A client with a small receive buffer that takes ``--bytes-per-s``."""

    def __init__(self, url: httpx.URL, number: int) -> None:
        self.received, self.ended = 0, "reading"
        text = " ".join([f"r{number}", *["word"] * (WORDS - 1)])
        body = json.dumps({"model": "ramp", "input": text, "response_format": "pcm"}).encode()
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect((url.host, url.port or 80))
        head = "POST /v1/audio/speech HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        self._socket.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        self._socket.setblocking(False)

    async def read(self) -> None:
        """Slowly for ``--seconds``, then whatever is still on its way."""
        until = time.monotonic() + given.seconds
        with self._socket:
            reading = await self._took(given.bytes_per_s or 1000)
            if reading and not given.bytes_per_s:
                await asyncio.sleep(given.seconds)
            while reading and time.monotonic() < until:
                await asyncio.sleep(1)
                reading = await self._took(given.bytes_per_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(REST_S):
                    while await self._took(2**16):
                        pass

    async def _took(self, size: int) -> bool:
        try:
            piece = await asyncio.get_running_loop().sock_recv(self._socket, size)
        except OSError as error:
            self.ended = type(error).__name__
            return False
        if not piece:
            self.ended = "closed"
        self.received += len(piece)
        return bool(piece)


async def others(client: httpx.AsyncClient, until: float) -> list[float]:
    """Short speech, again and again; seconds until each first sound. All must be exact."""
    first = []
    while time.monotonic() < until:
        answer = await ask(client, "speech", "somebody else speaks meanwhile")
        assert answer.outcome == "right", answer
        assert answer.first_sound_s is not None
        first.append(answer.first_sound_s)
        await asyncio.sleep(0.5)
    return first


async def measure(ramp: RampCluster) -> None:
    async with httpx.AsyncClient(base_url=ramp.url, timeout=60) as client:
        alone = await others(client, time.monotonic() + 5)
        before = ramp.object_store_bytes()
        print(f"| seconds | {' | '.join(COLUMNS)} | object store | readers left | codec streams | largest lead, s |")
        print("|---" * (len(COLUMNS) + 5) + "|")
        started = time.monotonic()
        readers: list[Reader] = []
        tasks: list[asyncio.Task[None]] = []
        beside = asyncio.create_task(others(client, started + given.seconds))
        while True:
            now = time.monotonic() - started
            (codec,) = await asyncio.to_thread(ramp.states, "code2wav")
            cells = [f"{mib:.0f}" for mib in (await asyncio.to_thread(memory_mib)).values()]
            store = (ramp.object_store_bytes() - before) / 2**20
            left = sum(reader.ended == "reading" for reader in readers)
            lead = max(codec.leads, default=0.0)
            print(
                f"| {now:.0f} | {' | '.join(cells)} | {store:.0f} | {left} | {codec.ongoing} | {lead:.0f} |", flush=True
            )
            if now > given.seconds:
                break
            if not readers:
                readers = [Reader(httpx.URL(ramp.url), number) for number in range(given.readers)]
                tasks = [asyncio.create_task(reader.read()) for reader in readers]
            await asyncio.sleep(5)
        crowded = await beside
    await asyncio.gather(*tasks)
    print(f"\nReceived by each reader in the end: {sorted(reader.received for reader in readers)} bytes,",
          Counter(reader.ended for reader in readers))  # fmt: skip
    print(f"First sound of others, median ms: {1e3 * statistics.median(alone):.0f} alone, "
          f"{1e3 * statistics.median(crowded):.0f} beside them; {len(crowded)} answers, all exact.")  # fmt: skip


if __name__ == "__main__":
    with ramp_cluster(1, config()) as running:
        asyncio.run(measure(running))
