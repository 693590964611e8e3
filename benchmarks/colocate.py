"""What sharing a process saves: ``ramp`` with its stages apart, and with ``colocate:``; same HTTP client, same machine.

Lateness is measured as ``overhead.py`` does, against a talker that makes a code frame (80 ms of sound) every
``--pace-ms``.

    python benchmarks/colocate.py            # writes colocate.md beside this file
"""

import argparse
import asyncio
import json
import os
import platform
import socket
import sys

import ray
from overhead import HERE, Row, measure, server

LAYOUTS: dict[str, list[str]] = {
    "three processes": [],
    "talker + code2wav in one": ["talker", "code2wav"],
    "all three in one": ["thinker", "talker", "code2wav"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--words", type=int, default=40, help="words per request, three frames each")
    parser.add_argument("--pace-ms", type=float, default=40, help="talker's time per frame of 80 ms")
    parser.add_argument("--chunk-frames", type=int, default=4)
    args = parser.parse_args()
    rows: list[Row] = []
    for layout, colocated in LAYOUTS.items():
        config = {
            "colocate": colocated,
            "stages": {
                "talker": {"engine": {"pace_ms": args.pace_ms}},
                "code2wav": {"engine": {"chunk_frames": [args.chunk_frames]}},
            },
            "ingress": {"grace_s": 2},
        }
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        with server("serve, default", port, json.dumps(config)) as root:
            for streams in args.streams:
                url = f"http://127.0.0.1:{port}"
                rows.append(asyncio.run(measure(url, layout, streams, args.words, args.pace_ms / 1000, root)))
                print(rows[-1], file=sys.stderr, flush=True)
        write(rows, args)


def write(rows: list[Row], args: argparse.Namespace) -> None:
    lines = [
        "# What sharing a process saves",
        "",
        "`python benchmarks/colocate.py` wrote this file. `ramp` through Ray Serve in its default mode. Lateness is "
        "measured against the talker's own even schedule; the ideal first byte is at "
        f"{args.pace_ms * args.chunk_frames:g} ms.",
        "",
        f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}, "
        f"Ray {ray.__version__}, load average {os.getloadavg()[0]:.1f} at the end; {args.words} words = "
        f"{args.words * 3} frames per request, {args.pace_ms:g} ms per frame, chunks of {args.chunk_frames} frames; "
        "client on the same cores. No GPU: what two engines on one device gain or lose by sharing a process was not "
        "measured.",
        "",
        "| layout | streams | first byte p50 / p95 ms | late p50 / p95 ms | in real time | CPU s per audio s |",
        "|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r.server} | {r.streams} | {r.ttfb_ms_p50} / {r.ttfb_ms_p95} | {r.late_ms_p50} / {r.late_ms_p95} "
            f"| {r.real_time} | {r.cpu_s_per_audio_s} |"
        )
    (HERE / "colocate.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
