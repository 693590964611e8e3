"""What sharing a process saves: ``ramp`` with its stages apart, and with ``colocate:``; same HTTP client, same machine.

Lateness is measured as ``overhead.py`` does, against a talker that makes a code frame (80 ms of sound) every
``--pace-ms``.

    python benchmarks/colocate.py            # writes colocate.md beside this file
"""

import argparse

from overhead import HERE, Row, options, serve_and_measure, setting, table

LAYOUTS: dict[str, list[str]] = {
    "three processes": [],
    "talker + code2wav in one": ["talker", "code2wav"],
    "all three in one": ["thinker", "talker", "code2wav"],
}


def main() -> None:
    args = options(__doc__)
    rows: list[Row] = []
    for layout, colocated in LAYOUTS.items():
        rows += serve_and_measure(layout, "serve, default", args, colocate=colocated)
        write(rows, args)


def write(rows: list[Row], args: argparse.Namespace) -> None:
    lines = [
        "# What sharing a process saves",
        "",
        "`python benchmarks/colocate.py` wrote this file. `ramp` through Ray Serve in its default mode. Lateness is "
        "measured against the talker's own even schedule; the ideal first byte is at "
        f"{args.pace_ms * args.chunk_frames:g} ms.",
        "",
        f"{setting(args)}. No GPU: what two engines on one device gain or lose by sharing a process was not measured.",
        "",
        *table("layout", rows),
    ]
    (HERE / "colocate.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
