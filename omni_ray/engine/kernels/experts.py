"""Routed experts without a host in the loop: who goes where is decided, grouped and computed on the GPU.

The router's choice is a table of assignments [M, A]: per row the k experts chosen, then the shared ones, which are
further experts of the same shape that every row takes (a shared expert of twice the width is two of them). Weight
tables hold all of them: ``up`` [E, 2 I, H] (gate rows first) and ``down`` [E, H, I]. The norm before has no gain: it is
multiplied into ``router`` and ``up``.

With one row, the chosen experts' weights are read and no others. With more, each expert's assignments are listed (in an
order that no result depends on), an expert's weights are read once per 16 rows, and the parts of a row are summed in a
fixed order.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
from torch import Tensor

from omni_ray.engine.kernels.expert_kernels import collect, down_grouped, down_one, route, up_grouped, up_one
from omni_ray.engine.kernels.launch import following
from omni_ray.engine.kernels.linear import Tiles, linear, precision, stages
from omni_ray.engine.kernels.rows import ROW_WORDS

GROUP: Final = 16
"""Rows that an expert's weights are multiplied with at once."""

COLLECTED: Final = 256
"""Numbers of a row that are summed at once in the end."""


@dataclass(frozen=True, slots=True)
class Experts:
    """One layer's.

    Attributes:
        router: [routed experts + 1, H]; the last row is the shared expert's gate.
        up: [E, 2 I, H].
        down: [E, H, I].
        chosen: routed experts per row.
        normalised: whether the chosen ones' weights are scaled to a sum of 1.
        eps: of the norm before.
    """

    router: Tensor
    up: Tensor
    down: Tensor
    chosen: int
    normalised: bool
    eps: float

    @property
    def assignments(self) -> int:
        """Per row: the chosen experts and all shared ones."""
        return self.chosen + len(self.up) - (len(self.router) - 1)


@dataclass(frozen=True, slots=True)
class ExpertScratch:
    """Between the kernels of a layer.

    Attributes:
        logits: float32 [M, routed experts + 1].
        experts: int32 [M, A]; -1 in rows of nobody.
        weights: float32 [M, A].
        factors: float32 [M], of the norm.
        lists: int32 [E, M], assignments of each expert.
        inner: [M A, I].
        parts: float32 [M A, H].
    """

    logits: Tensor
    experts: Tensor
    weights: Tensor
    factors: Tensor
    lists: Tensor
    inner: Tensor
    parts: Tensor

    @classmethod
    def empty(cls, m: int, like: Experts) -> "ExpertScratch":
        """For layers shaped like ``like``."""
        a, (count, hidden, width), device = like.assignments, like.down.shape, like.up.device
        return cls(
            torch.empty(m, len(like.router), device=device),
            torch.empty(m, a, dtype=torch.int32, device=device),
            torch.empty(m, a, device=device),
            torch.empty(m, device=device),
            torch.empty(count, m, dtype=torch.int32, device=device),
            like.up.new_empty(m * a, width),
            torch.empty(m * a, hidden, device=device),
        )


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """How the two products of experts are cut; ``rows`` and one row's ``inputs`` are not asked."""

    up: Tiles
    down: Tiles


ONE_ROW: Final = ExpertTiles(Tiles(1, 2, 0, 2, 1), Tiles(1, 2, 0, 2, 1))
MANY_ROWS: Final = ExpertTiles(Tiles(GROUP, 32, 128, 4, 4), Tiles(GROUP, 64, 128, 4, 3))
"""What was fastest on an H200 (benchmarks/h200.md)."""


def add_experts(
    x: Tensor,
    rows: Tensor,
    layer: Experts,
    scratch: ExpertScratch,
    counts: Tensor,
    tiles: ExpertTiles | None = None,
    squares: Tensor | None = None,
    squares_left: Tensor | None = None,
) -> None:
    """``x`` += the experts' weighted sum of ``x / rms(x)``, for rows that are somebody's.

    Args:
        x: [M, H].
        rows: see ``rows``.
        layer: its weights.
        scratch: shared by all layers.
        counts: int32 [E], zeros before.
        tiles: None takes what was fastest.
        squares: those of ``x`` before, see ``linear``.
        squares_left: float32 [M, H / ``COLLECTED``], those of ``x`` afterwards; not written for one row.
    """
    m, hidden = x.shape
    count, _, width = layer.down.shape
    a, routed = layer.assignments, len(layer.router) - 1
    linear(x, layer.router, scratch.logits, eps=layer.eps, squares=squares)
    pdl = following(x)
    route[(m,)](
        x, rows, scratch.logits, scratch.experts, scratch.weights, scratch.factors, scratch.lists, counts, layer.eps,
        WORDS=ROW_WORDS, M=m, H=hidden, ROUTED=routed, SHARED=count - routed, CHOSEN=layer.chosen,
        NORMALISED=layer.normalised, BLOCK_E=triton.next_power_of_2(routed), BLOCK_H=triton.next_power_of_2(hidden),
        num_warps=1, **pdl,
    )  # fmt: skip
    how = tiles or (ONE_ROW if m == 1 else MANY_ROWS)
    up, down = how.up, how.down
    if m == 1:
        up_one[(triton.cdiv(width, up.outputs), a)](
            x, layer.up, scratch.experts, scratch.factors, scratch.inner,
            H=hidden, WIDTH=width, BLOCK_N=up.outputs, BLOCK_K=triton.next_power_of_2(hidden),
            num_warps=up.warps, **pdl,
        )  # fmt: skip
        down_one[(triton.cdiv(hidden, down.outputs),)](
            scratch.inner, layer.down, scratch.experts, scratch.weights, x,
            H=hidden, WIDTH=width, A=a, BLOCK_N=down.outputs, BLOCK_K=triton.next_power_of_2(width),
            num_warps=down.warps, **pdl,
        )  # fmt: skip
        return
    common = {
        "E": count,
        "M": m,
        "H": hidden,
        "WIDTH": width,
        "A": a,
        "BLOCK_M": GROUP,
        **pdl,
        "PRECISION": precision(x.dtype),
    }
    up_grouped[(triton.cdiv(width, up.outputs), count)](
        x, layer.up, scratch.factors, scratch.lists, counts, scratch.inner,
        BLOCK_N=up.outputs, BLOCK_K=min(up.inputs, max(16, triton.next_power_of_2(hidden))),
        num_warps=up.warps, num_stages=stages(up, x.dtype), **common,
    )  # fmt: skip
    down_grouped[(triton.cdiv(hidden, down.outputs), count)](
        scratch.inner, layer.down, scratch.weights, scratch.lists, counts, scratch.parts,
        BLOCK_N=down.outputs, BLOCK_K=min(down.inputs, max(16, triton.next_power_of_2(width))),
        num_warps=down.warps, num_stages=stages(down, x.dtype), **common,
    )  # fmt: skip
    collect[(m, triton.cdiv(hidden, COLLECTED))](
        scratch.parts, scratch.experts, x, x if squares_left is None else squares_left,
        H=hidden, A=a, BLOCK_A=triton.next_power_of_2(a), BLOCK_N=COLLECTED, LEAVES=squares_left is not None,
        num_warps=2, **pdl,
    )  # fmt: skip
