"""What the graph costs: ``ramp`` through Ray Serve against the same stages chained in one process, same HTTP client.

Every code frame (80 ms of sound) comes out of the talker on an even schedule of ``--pace-ms``, so the ideal arrival of
each piece of sound is known and everything later than it is overhead. Three servers are measured one after the other:
the chain in one uvicorn process, Ray Serve in its default mode, and Ray Serve with HAProxy and throughput mode.

    python benchmarks/overhead.py            # writes overhead.json and overhead.md beside this file
"""

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx
import psutil

from omni_ray.models.ramp import oracle
from omni_ray.serve import haproxy
from omni_ray.serve.ports import free_port

HERE = Path(__file__).parent
SAMPLE_RATE, FRAME_S = 24000, 0.08
MODES = {
    "one process": {},
    "serve, default": {},
    "serve, haproxy + throughput": dict(haproxy.MODE),
}


@dataclass
class Row:
    """One line of the result."""

    server: str
    streams: int
    ttfb_ms_p50: float
    ttfb_ms_p95: float
    late_ms_p50: float
    late_ms_p95: float
    real_time: str
    cpu_s_per_audio_s: float


@dataclass
class Stream:
    """One client's arrivals: (seconds since the request, bytes so far)."""

    arrivals: list[tuple[float, int]]
    exact: bool


async def listen(client: httpx.AsyncClient, text: str) -> Stream:
    body = {"model": "ramp", "input": text, "voice": "a", "response_format": "pcm"}
    started, pcm, arrivals = time.monotonic(), bytearray(), []
    async with client.stream("POST", "/v1/audio/speech", json=body) as response:
        response.raise_for_status()
        async for piece in response.aiter_raw():
            pcm += piece
            arrivals.append((time.monotonic() - started, len(pcm)))
    return Stream(arrivals, bytes(pcm) == oracle.pcm(text))


def lateness(stream: Stream, pace_s: float) -> list[float]:
    """Seconds by which each arrival is later than the talker's schedule for its last frame."""
    return [at - nbytes / 2 / SAMPLE_RATE / FRAME_S * pace_s for at, nbytes in stream.arrivals]


def held(stream: Stream) -> bool:
    """Whether a player that starts with the first piece never runs dry."""
    start, before = stream.arrivals[0][0], 0
    for at, nbytes in stream.arrivals:
        if before and at - start > before / 2 / SAMPLE_RATE:
            return False
        before = nbytes
    return True


async def measure(url: str, server: str, streams: int, words: int, pace_s: float, root: psutil.Process) -> Row:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        await asyncio.gather(*(listen(client, f"warm {k}") for k in range(streams)))
        cpu = cpu_seconds(root)
        texts = [f"stream {k} " + " ".join(["word"] * (words - 2)) for k in range(streams)]

        async def staggered(k: int, text: str) -> Stream:
            await asyncio.sleep(k * 0.32 / streams)  # chunks of different streams do not all fall into one moment
            return await listen(client, text)

        done = await asyncio.gather(*(staggered(k, t) for k, t in enumerate(texts)))
        cpu = cpu_seconds(root) - cpu
    assert all(s.exact for s in done), "a stream differed from the oracle"
    late = sorted(x * 1000 for s in done for x in lateness(s, pace_s))
    ttfb = sorted(s.arrivals[0][0] * 1000 for s in done)
    audio_s = sum(s.arrivals[-1][1] for s in done) / 2 / SAMPLE_RATE
    return Row(
        server,
        streams,
        round(statistics.median(ttfb), 1),
        round(ttfb[int(0.95 * (len(ttfb) - 1))], 1),
        round(statistics.median(late), 1),
        round(late[int(0.95 * (len(late) - 1))], 1),
        f"{sum(held(s) for s in done)}/{streams}",
        round(cpu / audio_s, 4),
    )


def cpu_seconds(root: psutil.Process) -> float:
    """CPU time of the server's processes so far (its Ray daemons included)."""
    total = 0.0
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


@contextmanager
def server(mode: str, port: int, config: str) -> Iterator[psutil.Process]:
    """Start a server, wait until it is ready, stop it."""
    command = [sys.executable, "-m", "omni_ray.cli", "serve", "ramp", f"deploy_config={config}", "--port", str(port)]
    if mode == "one process":
        command = [sys.executable, str(HERE / "one_process.py"), str(port), config]
    environment = {**os.environ, **MODES[mode], "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            deadline = time.monotonic() + 120
            while time.monotonic() < deadline:
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 200:
                        break
                except httpx.HTTPError:
                    time.sleep(0.2)
            else:
                log.seek(0)
                raise SystemExit(f"{mode} was not ready in time; it said:\n{log.read()[-4000:]}")
            yield psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)


def options(about: str | None) -> argparse.Namespace:
    """What the command line says of the requests; ``about`` is its help."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--words", type=int, default=40, help="words per request, three frames each")
    parser.add_argument("--pace-ms", type=float, default=40, help="talker's time per frame of 80 ms")
    parser.add_argument("--chunk-frames", type=int, default=4)
    return parser.parse_args()


def serve_and_measure(name: str, mode: str, args: argparse.Namespace, **deploy: object) -> list[Row]:
    """Start a server of ``mode``, called ``name`` in the rows; a row for each number of streams.

    ``deploy``: more keys of the deploy config.
    """
    config = {
        **deploy,
        "stages": {
            "talker": {"engine": {"pace_ms": args.pace_ms}},
            "code2wav": {"engine": {"chunk_frames": [args.chunk_frames]}},
        },
        "ingress": {"grace_s": 2},
    }
    port = free_port()
    print(f"starting: {name}", file=sys.stderr, flush=True)
    rows = []
    with server(mode, port, json.dumps(config)) as root:
        for streams in args.streams:
            url = f"http://127.0.0.1:{port}"
            rows.append(asyncio.run(measure(url, name, streams, args.words, args.pace_ms / 1000, root)))
            print(rows[-1], file=sys.stderr, flush=True)
    return rows


def setting(args: argparse.Namespace) -> str:
    """The machine and the requests, in words."""
    import ray

    return (
        f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}, "
        f"Ray {ray.__version__}, "
        f"load average {os.getloadavg()[0]:.1f} at the end; {args.words} words = {args.words * 3} frames per request, "
        f"{args.pace_ms:g} ms per frame, chunks of {args.chunk_frames} frames; client on the same cores"
    )


def table(first_column: str, rows: list[Row]) -> list[str]:
    """``rows`` in Markdown."""
    return [
        f"| {first_column} | streams | first byte p50 / p95 ms | late p50 / p95 ms | in real time "
        "| CPU s per audio s |",
        "|---|---|---|---|---|---|",
        *(
            f"| {r.server} | {r.streams} | {r.ttfb_ms_p50} / {r.ttfb_ms_p95} | {r.late_ms_p50} / {r.late_ms_p95} "
            f"| {r.real_time} | {r.cpu_s_per_audio_s} |"
            for r in rows
        ),
    ]


def main() -> None:
    args = options(__doc__)
    rows = [row for mode in MODES for row in serve_and_measure(mode, mode, args)]
    write(rows, args)


def write(rows: list[Row], args: argparse.Namespace) -> None:
    said = setting(args)
    result = {"setting": said, "rows": [asdict(r) for r in rows]}
    (HERE / "overhead.json").write_text(json.dumps(result, indent=2) + "\n")
    lines = [
        "# What the graph costs",
        "",
        "`python benchmarks/overhead.py` wrote this file. Lateness is measured against the talker's own even schedule; "
        f"the ideal first byte is at {args.pace_ms * args.chunk_frames:g} ms.",
        "",
        said,
        "",
        *table("server", rows),
    ]
    (HERE / "overhead.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines[6:]))


if __name__ == "__main__":
    main()
