"""What takeover costs and what a listener notices of it: ``ramp`` through Ray Serve, streams at twice real time.

Three things: the bytes that records add, by the types that really travel; first byte, lateness and CPU time with
takeover on and off, in turns; and how much later than without a fault the stream's next sound comes after kill -9 of
each stage, early and late in the stream, with a second replica standing by.

    python benchmarks/takeover.py            # writes takeover.md beside this file
"""

import argparse
import asyncio
import json
import os
import pickle
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from overhead import FRAME_S, SAMPLE_RATE, Row, measure, server

from omni_ray.engine.types import CodeFrameChunk, TextChunk
from omni_ray.models.ramp import oracle
from omni_ray.serve.events import RecordEvent
from omni_ray.serve.ports import free_port
from omni_ray.serve.records import merged

HERE = Path(__file__).parent
STAGES = ("talker", "code2wav")
CHUNK_FRAMES = 4
CODEBOOKS, FRAMES_PER_S, TOKENS_PER_S = 16, 12.5, 4


@dataclass
class Death:
    """One kill: seconds of sound heard before it, and by how much later than on schedule sound came after it."""

    stage: str
    at_s: float
    worst_late_s: float


def record_bytes(chunk_frames: int) -> float:
    """Bytes per second of sound: 16 codebooks and 4 tokens a second, merged as they are for one message."""
    frames = [RecordEvent("talker", CodeFrameChunk(k, np.zeros((1, CODEBOOKS), np.int64))) for k in range(chunk_frames)]
    seconds = chunk_frames / FRAMES_PER_S
    words = [RecordEvent("thinker", TextChunk(k, " word", (k,))) for k in range(round(seconds * TOKENS_PER_S))]
    return len(pickle.dumps(merged([*words, *frames]), pickle.HIGHEST_PROTOCOL)) / seconds


def config(pace_ms: float, takeover: bool, replicas: int) -> str:
    one = {"deployment": {"num_replicas": replicas}}
    return json.dumps(
        {
            "stages": {
                "thinker": one,
                "talker": {**one, "engine": {"pace_ms": pace_ms, "allow_request_faults": True}},
                "code2wav": {**one, "engine": {"chunk_frames": [CHUNK_FRAMES], "allow_request_faults": True}},
            },
            "ingress": {"grace_s": 2, "takeover": takeover},
        }
    )


def cost(streams: int, words: int, pace_ms: float, rounds: int) -> dict[bool, list[Row]]:
    """``overhead``'s figures with takeover on and off, in turns, so that a noisy neighbour meets both."""
    rows: dict[bool, list[Row]] = {True: [], False: []}
    for _ in range(rounds):
        for takeover in (False, True):
            port = free_port()
            with server("serve, default", port, config(pace_ms, takeover, 1)) as root:
                url = f"http://127.0.0.1:{port}"
                row = asyncio.run(measure(url, str(takeover), streams, words, pace_ms / 1000, root))
            rows[takeover].append(row)
            print(row, file=sys.stderr, flush=True)
    return rows


async def death(url: str, stage: str, at_s: float, pace_s: float) -> Death:
    """One stream of ``at_s`` + 8 seconds; ``stage`` kills its process with SIGKILL after ``at_s`` seconds of sound."""
    frame = round(at_s / FRAME_S)
    faults = {stage: {"kill_at": {"talker": frame, "code2wav": frame // CHUNK_FRAMES}[stage], "attempts": 1}}
    text = " ".join(["word"] * round((at_s + 8) / FRAME_S / 3))
    body = {"model": "ramp", "input": text, "voice": "a", "response_format": "pcm", "ramp": faults}
    started, pcm, arrivals = time.monotonic(), bytearray(), []
    async with (
        httpx.AsyncClient(base_url=url, timeout=120) as client,
        client.stream("POST", "/v1/audio/speech", json=body) as response,
    ):
        async for piece in response.aiter_raw():
            pcm += piece
            arrivals.append((time.monotonic() - started, len(pcm)))
    assert bytes(pcm) == oracle.pcm(text), "the stream differed from the oracle"
    late = max(at - nbytes / 2 / SAMPLE_RATE / FRAME_S * pace_s for at, nbytes in arrivals)
    return Death(stage, at_s, round(late, 2))


def deaths(pace_ms: float, seconds: list[float]) -> list[Death]:
    port, out = free_port(), []
    with server("serve, default", port, config(pace_ms, True, 2)):
        for at_s in seconds:
            for stage in STAGES:
                time.sleep(12)  # the replica that was killed last must be back
                out.append(asyncio.run(death(f"http://127.0.0.1:{port}", stage, at_s, pace_ms / 1000)))
                print(out[-1], file=sys.stderr, flush=True)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--words", type=int, default=40)
    parser.add_argument("--pace-ms", type=float, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--death-at", type=float, nargs="+", default=[3, 20])
    args = parser.parse_args()
    sizes = {chunk: record_bytes(chunk) for chunk in (4, 25)}
    rows = cost(args.streams, args.words, args.pace_ms, args.rounds)
    fell = deaths(args.pace_ms, args.death_at)
    write(args, sizes, rows, fell)


def write(args: argparse.Namespace, sizes: dict[int, float], rows: dict[bool, list[Row]], fell: list[Death]) -> None:
    import ray

    lines = [
        "# What takeover costs",
        "",
        "`python benchmarks/takeover.py` wrote this file.",
        "",
        f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}, "
        f"Ray {ray.__version__}, load average {os.getloadavg()[0]:.1f} at the end; {args.pace_ms:g} ms per frame of "
        "80 ms; client on the same cores.",
        "",
        f"**Records** of {CODEBOOKS} codebooks at {FRAMES_PER_S:g} frames and {TOKENS_PER_S} tokens a second, pickled: "
        + ", ".join(
            f"{size:.0f} bytes per second of sound in chunks of {chunk} frames" for chunk, size in sizes.items()
        )
        + ". Sound itself is 96000. They travel in messages that are sent anyway.",
        "",
        f"**{args.streams} streams** of {args.words * 3} frames, takeover off and on in turns; cells list the rounds:",
        "",
        "| takeover | first byte p50 ms | late p50 ms | late p95 ms | in real time | CPU s per audio s |",
        "|---|---|---|---|---|---|",
    ]
    for takeover in (False, True):
        mine = rows[takeover]
        cells = (
            [r.ttfb_ms_p50 for r in mine], [r.late_ms_p50 for r in mine], [r.late_ms_p95 for r in mine],
            [r.real_time for r in mine], [r.cpu_s_per_audio_s for r in mine],
        )  # fmt: skip
        lines.append(f"| {'on' if takeover else 'off'} | " + " | ".join(", ".join(map(str, c)) for c in cells) + " |")
    lines += [
        "",
        "**A death** in mid-stream, a second replica standing by; every stream equalled the oracle byte for byte. The "
        "stream runs at twice real time, so a player that started with the first sound had half of what it had heard "
        "in hand:",
        "",
        "| killed | after s of sound | worst lateness s |",
        "|---|---|---|",
        *(f"| {d.stage} | {d.at_s:g} | {d.worst_late_s:g} |" for d in fell),
    ]
    (HERE / "takeover.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
