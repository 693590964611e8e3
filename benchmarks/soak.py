"""Cancels at random moments and whole answers, round after round: does anything grow?

    python benchmarks/soak.py                          # an hour; writes soak.md and soak.svg
    python benchmarks/soak.py --minutes 10             # shorter
    python benchmarks/soak.py --cancels 2000 --rounds 2 --out -   # two rounds, to standard output

A round is so many cancelled requests (before the first byte too; streamed and not; in the middle of the upload) and a
tenth as many that are heard to their end. After each one, when all is still, the memory of every process, the object
stores, /dev/shm and the counters are read. Memory is what the process alone holds (USS).
"""

import argparse
import asyncio
import contextlib
import gc
import os
import platform
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil
import ray
from ramp_client import ROUTES, VOICES, ask, body, some_text
from ramp_cluster import RampCluster, deploy_config, ours, ramp_cluster, wait_until

TITLES = re.compile(r"ray::(ServeReplica:ramp:\w+|ServeController|ProxyActor)|.*/raylet/raylet|.*/gcs/gcs_server")
AT_ONCE = 24
SLOPE_LIMIT = 1.0
"""MiB per 1,000 requests, in any process."""


@dataclass(frozen=True)
class Reading:
    """What the server held after ``requests`` requests; bytes. ``memory`` is by process, (title, pid)."""

    requests: int
    memory: dict[tuple[str, int], int]
    object_store: float
    shm: int
    at_work: int


async def cancel(client: httpx.AsyncClient, rng: random.Random) -> None:
    """One request that is given up at a random moment."""
    kind = rng.choice(("stream", "early", "upload"))
    path, sent = body(rng.choice(ROUTES), some_text(rng, rng.randint(20, 60)), rng.choice(VOICES), None)
    if kind == "upload":
        url = client.base_url
        _, writer = await asyncio.open_connection(url.host, url.port)
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 5000\r\n\r\n"
        writer.write(head.encode() + b'{"model":"ramp","input":"')
        await writer.drain()
        await asyncio.sleep(rng.uniform(0, 0.05))
        writer.transport.abort()
        return
    after = rng.uniform(0, 0.1) if kind == "early" else rng.uniform(0.1, 1)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(after), client.stream("POST", path, json=sent) as response:
            async for _ in response.aiter_raw():
                pass


async def one_round(running: RampCluster, cancels: int, rng: random.Random) -> Counter[str]:
    """``cancels`` cancelled requests and a tenth as many whole ones, ``AT_ONCE`` at a time; outcomes of the latter."""
    outcomes: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    gate = asyncio.Semaphore(AT_ONCE)

    async def whole() -> None:
        async with gate:
            answer = await ask(client, rng.choice(ROUTES), some_text(rng, rng.randint(2, 10)), rng.choice(VOICES))
            outcomes[answer.outcome] += 1

    async def given_up() -> None:
        async with gate:
            await cancel(client, rng)

    async with httpx.AsyncClient(base_url=running.url, timeout=60, limits=limits) as client:
        work = [given_up() for _ in range(cancels)] + [whole() for _ in range(cancels // 10)]
        rng.shuffle(work)
        await asyncio.gather(*work)
    return outcomes


def read(running: RampCluster, requests: int) -> Reading:
    """Wait until all is still, then look."""
    wait_until(lambda: running.at_work() == 0, 10)
    gc.collect()
    memory: dict[tuple[str, int], int] = {}
    for process, title in ours():
        if found := TITLES.match(title):
            name = found[0].rpartition("/")[2].removeprefix("ray::")
            with contextlib.suppress(psutil.Error):
                memory[name, process.pid] = process.memory_full_info().uss
    shm = sum(f.stat().st_blocks * 512 for f in Path("/dev/shm").rglob("*") if f.is_file())
    return Reading(requests, memory, running.object_store_bytes(), shm, running.at_work())


def slopes(readings: list[Reading]) -> dict[tuple[str, int], float]:
    """MiB per 1,000 requests of every process that lived throughout, from the second reading on: the first round
    fills pools and caches.
    """
    kept = readings[1:]
    out = {}
    for key in kept[0].memory:
        if all(key in reading.memory for reading in kept):
            x = np.array([r.requests for r in kept]) / 1000
            y = np.array([r.memory[key] for r in kept]) / 2**20
            out[key] = float(np.polyfit(x, y, 1)[0]) if len(kept) > 1 else 0.0
    return out


def page(readings: list[Reading], outcomes: Counter[str], seconds: float) -> tuple[str, bool]:
    """The report, and whether nothing grew."""
    rates = slopes(readings)
    first, last = readings[1], readings[-1]
    lines = [
        "# Soak",
        "",
        f"`python benchmarks/soak.py`: {last.requests} requests of `ramp` over HTTP in {seconds / 60:.0f} minutes, ten "
        f"cancelled for each one heard to its end, {AT_ONCE} at a time; two replicas of everything, latents as object "
        f"refs, `MALLOC_ARENA_MAX=2`. {os.cpu_count()} CPU cores, {platform.machine()}, Python "
        f"{platform.python_version()}, Ray {ray.__version__}.",
        "",
        f"Answers heard to their end: {dict(outcomes)}. Requests left in a stage: {last.at_work}. Object store: "
        f"{first.object_store / 2**20:.1f} MiB after the first round, {last.object_store / 2**20:.1f} at the end; "
        f"/dev/shm {first.shm / 2**20:.0f} and {last.shm / 2**20:.0f} MiB.",
        "",
        "| process | MiB after the first round | at the end | MiB per 1,000 requests |",
        "|---|---|---|---|",
    ]
    for key, rate in sorted(rates.items()):
        start, end = first.memory[key] / 2**20, last.memory[key] / 2**20
        lines.append(f"| {key[0]} | {start:.1f} | {end:.1f} | {rate:+.2f} |")
    held = (
        all(rate < SLOPE_LIMIT for rate in rates.values())
        and set(outcomes) <= {"right"}
        and last.at_work == 0
        and last.object_store <= first.object_store + 2**20
    )
    lines += [
        "",
        f"Held: no process grew by {SLOPE_LIMIT:g} MiB or more per 1,000 requests, and nothing is left."
        if held
        else f"NOT held: something grew by {SLOPE_LIMIT:g} MiB or more, or is left.",
    ]
    return "\n".join(lines) + "\n", held


def plot(readings: list[Reading]) -> str:
    """Memory of every process over requests, as SVG."""
    width, height, left = 800, 400, 60
    keys = [key for key in readings[-1].memory if all(key in r.memory for r in readings)]
    top = max(max(r.memory[key] for key in keys) for r in readings) / 2**20 * 1.1
    end = readings[-1].requests
    colours = ("#1b6ca8", "#c0392b", "#27ae60", "#8e44ad", "#d35400", "#16a085", "#7f8c8d", "#2c3e50")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width + 220} {height + 40}" font-family="sans-serif" '
        f'font-size="11"><rect width="100%" height="100%" fill="white"/>'
    ]
    for step in range(5):
        y = height - height * step / 4
        parts.append(f'<line x1="{left}" x2="{width}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 5}" y="{y + 4}" text-anchor="end">{top * step / 4:.0f} MiB</text>')
    for number, key in enumerate(keys):
        colour = colours[number % len(colours)]
        points = " ".join(
            f"{left + (width - left) * r.requests / end:.1f},{height - height * r.memory[key] / 2**20 / top:.1f}"
            for r in readings
        )
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        parts.append(f'<text x="{width + 10}" y="{15 + 14 * number}" fill="{colour}">{key[0]}</text>')
    parts.append(f'<text x="{left}" y="{height + 20}">0 to {end} requests</text></svg>')
    return "\n".join(parts)


def main() -> int:
    """Rounds until the time or their number is over."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rounds", type=int, default=10**6)
    parser.add_argument("--cancels", type=int, default=2000, help="per round")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true", help="tell each process's MiB after each round")
    parser.add_argument("--out", default=str(Path(__file__).with_name("soak.md")), help="file, or -")
    args = parser.parse_args()
    rng, started = random.Random(args.seed), time.monotonic()
    outcomes: Counter[str] = Counter()
    with ramp_cluster(1, deploy_config()) as running:
        readings = [read(running, 0)]
        while len(readings) <= args.rounds and time.monotonic() - started < 60 * args.minutes:
            outcomes += asyncio.run(one_round(running, args.cancels, rng))
            readings.append(read(running, readings[-1].requests + args.cancels + args.cancels // 10))
            last = readings[-1]
            total = sum(last.memory.values()) / 2**20
            print(f"{last.requests} requests, {total:.0f} MiB in all, {dict(outcomes)}", file=sys.stderr, flush=True)
            if args.verbose:
                each = (f"{name.rpartition(':')[2]} {size / 2**20:.1f}" for (name, _), size in last.memory.items())
                print("  " + ", ".join(each), file=sys.stderr, flush=True)
    text, held = page(readings, outcomes, time.monotonic() - started)
    if args.out == "-":
        print(text)
    else:
        Path(args.out).write_text(text)
        Path(args.out).with_suffix(".svg").write_text(plot(readings))
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
