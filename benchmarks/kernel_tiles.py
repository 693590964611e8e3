"""Tries ways to cut the talker's matrix products and prints the fastest: what ``tiles_of`` is made from.

Weights are rotated so that none is found in the cache, as in a frame. Compiles in several processes, measures in one.

    python benchmarks/kernel_tiles.py --rows 1 8 64
"""

import argparse
import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch

from omni_ray.engine.kernels.experts import Experts, ExpertScratch, ExpertTiles, add_experts
from omni_ray.engine.kernels.linear import FEW, Tiles, linear
from omni_ray.engine.kernels.rows import ROW_WORDS

SHAPES = {  # outputs, inputs, norm, gated, residual
    "talker qkv": (2560, 1024, True, False, False),
    "predictor qkv": (4096, 1024, True, False, False),
    "out": (1024, 2048, False, False, True),
    "up": (3072, 1024, True, True, False),
    "down": (1024, 3072, False, False, True),
    "head": (2048, 1024, True, False, False),
}
COPIES = 16
ROWS = {8: (16,), 16: (16,), 32: (16, 32), 64: (32, 64)}
CUTS = (
    (16, 64, 4, 6), (16, 128, 4, 4), (16, 128, 4, 6), (16, 256, 4, 3), (16, 256, 8, 4), (32, 64, 4, 6),
    (32, 128, 4, 4), (32, 128, 8, 4), (32, 64, 8, 6), (64, 64, 4, 5), (64, 64, 8, 5), (32, 256, 8, 3),
)  # fmt: skip
UP = ((64, 64, 4, 4), (32, 64, 4, 6), (32, 128, 4, 4), (64, 128, 4, 3), (64, 128, 8, 3), (64, 64, 8, 5), (128, 64, 8, 3), (32, 256, 4, 3))  # fmt: skip # noqa: E501
DOWN = ((128, 64, 4, 4), (256, 64, 4, 4), (64, 128, 4, 3), (64, 128, 8, 3), (128, 128, 8, 3), (128, 128, 4, 3), (64, 64, 4, 6), (128, 64, 8, 4))  # fmt: skip # noqa: E501
UP_ONE, DOWN_ONE = ((2, 2), (4, 2), (4, 4), (8, 4), (2, 4), (8, 8)), ((2, 2), (2, 4), (4, 4), (8, 4), (8, 8), (4, 8))

Launch = Callable[[], None]


def ways(rows: int) -> list[Tiles]:
    if rows <= FEW:
        return [Tiles(1, n, 0, warps, 1) for n, warps in itertools.product((2, 4, 8), (2, 4, 8))]
    return [Tiles(r, *cut) for r in ROWS[rows] for cut in CUTS]


def expert_ways(rows: int) -> list[ExpertTiles]:
    if rows == 1:
        pairs = zip(UP_ONE, DOWN_ONE, strict=True)
        return [ExpertTiles(Tiles(1, u[0], 0, u[1], 1), Tiles(1, d[0], 0, d[1], 1)) for u, d in pairs]
    return [ExpertTiles(Tiles(16, *up), Tiles(16, *down)) for up, down in zip(UP, DOWN, strict=True)]


def linear_launches(rows: int, shape: str, tiles: Tiles, copies: int) -> list[Launch]:
    n, k, normed, gated, residual = SHAPES[shape]
    like = {"device": "cuda", "dtype": torch.bfloat16}
    x, out = torch.randn(rows, k, **like), torch.randn(rows, n, **like)
    weights = [torch.randn(n * (2 if gated else 1), k, **like) for _ in range(copies)]
    eps, rest = (1e-6 if normed else None), (out if residual else None)
    return [lambda w=w: linear(x, w, out, eps=eps, residual=rest, gated=gated, tiles=tiles) for w in weights]


def expert_launches(rows: int, tiles: ExpertTiles, copies: int) -> list[Launch]:
    like = {"device": "cuda", "dtype": torch.bfloat16}
    shapes = (129, 1024), (130, 768, 1024), (130, 1024, 384)
    layers = [Experts(*(torch.randn(s, **like) for s in shapes), 6, True, 1e-6) for _ in range(copies)]
    table = torch.zeros(rows, ROW_WORDS, dtype=torch.int32, device="cuda")
    scratch, x = ExpertScratch.empty(rows, layers[0]), torch.randn(rows, 1024, **like)
    counts = torch.zeros(130, dtype=torch.int32, device="cuda")

    def launch(layer: Experts) -> None:
        counts.zero_()
        add_experts(x, table, layer, scratch, counts, tiles)

    return [lambda layer=layer: launch(layer) for layer in layers]


def launches(task: tuple, copies: int) -> list[Launch]:
    kind, rows, shape, tiles = task
    return linear_launches(rows, shape, tiles, copies) if kind == "linear" else expert_launches(rows, tiles, copies)


def compile_one(task: tuple) -> None:
    launches(task, 1)[0]()


def refusal(compile_task: Callable[[Any], None], task: Any) -> str:
    try:
        compile_task(task)
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, say: then it is no candidate
        return f"{task}: {str(error)[:200]}"
    return ""


def refusals(compile_task: Callable[[Any], None], tasks: Sequence[Any], chunksize: int = 4) -> list[str]:
    """Why each task does not compile, or an empty string; ``compile_task`` is called in several processes."""
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:
        return list(pool.map(partial(refusal, compile_task), tasks, chunksize=chunksize))


def timed(run: list[Launch]) -> float:
    """Microseconds per launch, of a graph of them all."""
    run[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in run:
            launch()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    graph.replay()
    start.record()
    for _ in range(4):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000 / 4 / len(run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    args = parser.parse_args()
    tasks: list[tuple] = []
    for rows in args.rows:
        tasks += [("linear", rows, shape, tiles) for shape in SHAPES for tiles in ways(rows)]
        tasks += [("experts", rows, "experts", tiles) for tiles in expert_ways(rows)]
    refused = refusals(compile_one, tasks)
    print(*filter(None, refused), sep="\n", flush=True)
    found: dict[tuple[int, str], list[tuple[float, object]]] = {}
    for task, problem in zip(tasks, refused, strict=True):
        if not problem:
            us = timed(launches(task, COPIES if task[0] == "linear" else 8))
            found.setdefault((task[1], task[2]), []).append((us, task[3]))
    for (rows, shape), results in found.items():
        print(f"{rows:3} rows, {shape}")
        for us, tiles in sorted(results, key=lambda result: result[0])[:4]:
            print(f"    {us:7.2f} us  {tiles}", flush=True)


if __name__ == "__main__":
    main()
