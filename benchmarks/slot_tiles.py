"""Tries ways to cut the talker's attention over slots, and prints the fastest: what ``SlotTiles`` is made from.

    python benchmarks/slot_tiles.py --rows 64

Every row is at the same live length; layers are rotated, so that nothing is found in the cache of the GPU. Compiles in
several processes, measures in one. Microseconds per layer, the sum of splits included.
"""

import argparse
from collections.abc import Callable
from functools import cache
from itertools import product

import torch
from kernel_tiles import refusals, timed

from omni_ray.engine.kernels.attention import HeadNorms
from omni_ray.engine.kernels.rows import nobody
from omni_ray.engine.kernels.slot_attention import Partials, SlotTiles, attend_slots
from omni_ray.engine.kv_table import KVTable

HEADS, GROUPS, DIM, LAYERS = 16, 2, 128, 8
LENGTHS = (1024, 4096)
TILES = (
    (64, 4, 3), (64, 4, 2), (64, 4, 4), (64, 2, 3), (64, 8, 3), (128, 4, 2), (128, 4, 3), (128, 8, 2), (128, 8, 3),
    (32, 4, 4), (32, 4, 3), (32, 2, 4),
)  # fmt: skip
SPLITS = {1: (32, 64), 8: (16, 32, 64), 64: (1, 2, 4, 8)}

Task = tuple[bool, int, int, int, SlotTiles]
"""Whether the cache is e4m3, rows, live length, splits, tiles."""


@cache
def tables(fp8: bool, rows: int, length: int) -> tuple[KVTable, KVTable]:
    like = torch.zeros(1, dtype=torch.bfloat16, device="cuda")
    made = [KVTable.zeros((LAYERS, rows, GROUPS, length + 64, DIM), like, fp8) for _ in range(2)]
    for table in made:
        for numbers in table.numbers:
            numbers.copy_(torch.randn(numbers.shape, dtype=torch.bfloat16, device="cuda"))
        if table.scales is not None:
            table.scales.fill_(1)
    return made[0], made[1]


def launches(task: Task, length: int | None = None) -> list[Callable[[], None]]:
    fp8, rows, live, splits, tiles = task
    keys, values = tables(fp8, rows, length or live)
    like = {"device": "cuda", "dtype": torch.bfloat16}
    qkv, out = torch.randn(rows, (HEADS + 2 * GROUPS) * DIM, **like), torch.empty(rows, HEADS * DIM, **like)
    norms = HeadNorms(torch.ones(DIM, **like), torch.ones(DIM, **like), 1e-6)
    rotary = (torch.ones(rows, DIM // 2, **like), torch.zeros(rows, DIM // 2, **like))
    told = nobody(rows)
    told[:, 0], told[:, 3] = range(rows), length or live
    table = torch.from_numpy(told).cuda()
    partials = Partials.empty(rows, HEADS, splits, DIM, qkv.device)
    return [
        lambda layer=layer: attend_slots(
            qkv, table, norms, rotary, keys, values, layer, partials, out, DIM**-0.5, tiles
        )
        for layer in range(LAYERS)
    ]


def compile_one(task: Task) -> None:
    launches(task, 128)[0]()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[64])
    args = parser.parse_args()
    for rows in args.rows:
        ways = [(fp8, rows, 128, s, SlotTiles(*t)) for fp8, s, t in product((False, True), SPLITS[rows], TILES)]
        refused = refusals(compile_one, ways, chunksize=2)
        print(*filter(None, refused), sep="\n", flush=True)
        for length, fp8 in product(LENGTHS, (False, True)):
            found = []
            for (eight, *_, splits, tiles), problem in zip(ways, refused, strict=True):
                if eight == fp8 and not problem:
                    found.append((timed(launches((fp8, rows, length, splits, tiles))), splits, tiles))
            tables.cache_clear()
            torch.cuda.empty_cache()
            found.sort(key=lambda result: result[0])
            megabytes = rows * length * GROUPS * 2 * (DIM + 4 if fp8 else 2 * DIM) / 1e6
            print(f"{rows} rows, KV {length}, {'fp8' if fp8 else 'bf16'}: {megabytes:.0f} MB")
            for us, splits, tiles in [*found[:5], *(f for f in found[5:] if f[1:] == (4, SlotTiles(64, 4, 3)))]:
                print(f"    {us:7.2f} us ({megabytes / us:.2f} TB/s)  {splits} splits, {tiles}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
