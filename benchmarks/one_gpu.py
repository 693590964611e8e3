"""Talker and codec on one GPU in one process, each on its own stream: how much they disturb each other.

    python benchmarks/one_gpu.py --out one_gpu.json

64 streams: the talker makes frames without a pause, the codec decodes what was made as soon as a chunk is full, as in a
replica that holds both stages. The thinker is not there; its share is taken from the budget (0.36 ms of GPU time per
second of sound at 64 streams).
"""

import argparse
import json
import queue
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from codec import FRAME_RATE, codes
from codec import load as load_codec
from frame import SAMPLING, table
from frame import load as load_talker

from omni_ray.engine.types import Request

ROWS, LENGTH, CHUNK = 64, 1024, 25
THINKER_MS = 0.36


def talk(captured: Any, frames: int, made: "queue.SimpleQueue[int | None]") -> float:
    """Mean ms per frame on the wall; every CHUNK frames the codec gets its work."""
    before = None
    start = time.perf_counter()
    for frame in range(frames):
        flight = captured.graphs.launch(table(captured, ROWS, LENGTH, frame))
        if before is not None:
            before.land()
        before = flight
        if frame % CHUNK == CHUNK - 1:
            made.put(frame)
    before.land()
    return (time.perf_counter() - start) * 1000 / frames


def decode(decoder: Any, made: "queue.SimpleQueue[int | None]", spent: list[float], rows: int) -> None:
    pasts: list[Any] = [None] * ROWS
    given = codes(ROWS, CHUNK, 1)
    while made.get() is not None:
        start = time.perf_counter()
        for first in range(0, ROWS, rows):
            part = slice(first, first + rows)
            pasts[part] = [past for _, past in decoder.step(pasts[part], given[part])]
        spent.append((time.perf_counter() - start) * 1000)
    for past in pasts:
        if past is not None:
            decoder.release(past)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dtypes", nargs="+", default=["tf32", "bfloat16"])
    args = parser.parse_args()
    result: dict[str, Any] = {}
    began = time.perf_counter()
    with torch.inference_mode():
        talker = load_talker(ROWS, LENGTH + 256)
        captured: Any = talker._captured
        talker.captures.wait()
        print(f"talker ready: {time.perf_counter() - began:.1f} s", flush=True)
        for slot in range(ROWS):
            captured.sample_as(slot, Request(str(slot), seed=slot, sampling=SAMPLING))
        nobody: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        talk(captured, 30, nobody)
        alone = talk(captured, 200, nobody)
        print(f"talker alone: {alone:.2f} ms per frame of {ROWS} rows, KV {LENGTH}", flush=True)
        for dtype in args.dtypes:
            for rows in (16, 32):
                began = time.perf_counter()
                decoder = load_codec(dtype, rows)
                ready = time.perf_counter() - began
                made: queue.SimpleQueue[int | None] = queue.SimpleQueue()
                spent: list[float] = []
                for _ in range(6):
                    made.put(0)
                made.put(None)
                decode(decoder, made, spent, rows)
                codec_alone = float(np.median(spent[1:]))
                spent.clear()
                thread = threading.Thread(target=decode, args=(decoder, made, spent, rows))
                thread.start()
                both = talk(captured, 500, made)
                made.put(None)
                thread.join()
                seconds = ROWS * CHUNK / FRAME_RATE
                per_second = {"talker": both / (ROWS / FRAME_RATE), "codec alone": codec_alone / seconds}
                whole = both / (ROWS / FRAME_RATE) + THINKER_MS
                row = {
                    "codec start s": ready, "talker ms": both, "codec chunk ms alone": codec_alone,
                    "codec chunk ms beside": float(np.median(spent)), **per_second,
                    "audio s/s without thinker": 1000 / (both / (ROWS / FRAME_RATE)),
                    "audio s/s with thinker's share": 1000 / whole, "at 80 %": 800 / whole,
                }  # fmt: skip
                result[f"{dtype}, {rows} rows"] = row
                print(dtype, rows, {k: round(v, 3) for k, v in row.items()}, flush=True)
                del decoder
                torch.cuda.empty_cache()
    result["talker alone ms"] = alone
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
