"""Tries tiles loaded by tensor memory access units, and sums of squares that are given, for dense products.

    python benchmarks/row_tiles.py --rows 64

Microseconds per product; weights are rotated. Compiles in several processes, checks and measures in one.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
from kernel_tiles import COPIES, SHAPES, refusals, timed

from omni_ray.engine.kernels.linear import Tiles, linear, tiles_of

CUTS = (
    (16, 128, 4, 4), (16, 128, 4, 6), (16, 256, 4, 3), (16, 64, 4, 8), (32, 128, 4, 4), (32, 64, 4, 8), (32, 256, 4, 3),
    (64, 128, 4, 3), (64, 64, 4, 6), (16, 256, 8, 4), (32, 128, 8, 4),
)  # fmt: skip

Task = tuple[int, str, Tiles, bool]
"""Rows, shape, tiles, whether sums of squares are given."""


def launches(task: Task, copies: int, check: bool = False) -> list[Callable[[], None]]:
    rows, shape, tiles, given = task
    n, k, normed, gated, residual = SHAPES[shape]
    like = {"device": "cuda", "dtype": torch.bfloat16}
    x, out = torch.randn(rows, k, **like), torch.randn(rows, n, **like)
    weights = [torch.randn(n * (2 if gated else 1), k, **like) / k**0.5 for _ in range(copies)]
    eps, rest = (1e-6 if normed else None), (out if residual else None)
    squares = x.float().square().view(rows, 64, -1).sum(-1) if given else None
    left = torch.zeros(rows, -(-n // tiles.outputs), device="cuda") if residual else None
    if check:
        wide = x.float() * (torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6) if normed else 1)
        whole = wide @ weights[0].float().T
        expected = torch.nn.functional.silu(whole[:, :n]) * whole[:, n:] if gated else whole
        expected = expected + out.float() if residual else expected
        linear(x, weights[0], out, eps=eps, residual=rest, gated=gated, tiles=tiles, squares=squares, squares_left=left)
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=4e-2)
        if left is not None:
            torch.testing.assert_close(left.sum(1), out.float().square().sum(1), rtol=1e-4, atol=1e-3)
    return [
        lambda w=w: linear(
            x, w, out, eps=eps, residual=rest, gated=gated, tiles=tiles, squares=squares, squares_left=left
        )
        for w in weights
    ]


def compile_one(task: Task) -> None:
    launches(task, 1, check=True)


def measured(task: Task) -> float:
    return timed(launches(task, COPIES))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[64])
    args = parser.parse_args()
    tasks: list[Task] = []
    for rows in args.rows:
        for shape, (n, _, normed, gated, _) in SHAPES.items():
            cuts = [Tiles(64, *cut) for cut in CUTS if not (gated and cut[0] > 32)]
            cuts += [replace(cut, fetched=True) for cut in cuts]
            now = {tiles_of(rows, n, gated, fetched) for fetched in (False, True)}
            tasks += [
                (rows, shape, t, given) for t in now.union(cuts) for given in ([False, True] if normed else [False])
            ]
    refused = refusals(compile_one, tasks)
    problems = [problem for problem in refused if problem]
    print(*problems[:10], f"{len(problems)} refused of {len(tasks)}", sep="\n", flush=True)
    good = [task for task, problem in zip(tasks, refused, strict=True) if not problem]
    for rows in args.rows:
        for shape, (n, _, normed, gated, _) in SHAPES.items():
            now = (rows, shape, tiles_of(rows, n, gated, True), normed)
            print(
                f"{rows:3} rows, {shape}: now {measured(now):.2f} us ({now[2]}{', squares given' * normed})", flush=True
            )
            for given in (False, True):
                for fetched in (False, True):
                    mine = [t for t in good if (t[0], t[1], t[2].fetched, t[3]) == (rows, shape, fetched, given)]
                    for us, tiles in sorted(((measured(t), t[2]) for t in mine), key=lambda found: found[0])[:2]:
                        print(f"    {us:7.2f} us  {tiles}{' squares given' if given else ''}", flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
