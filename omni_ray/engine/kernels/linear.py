"""Rows times a weight matrix, with what stands before and after it: RMS norm, SiLU gate, residual sum.

Shapes: M rows, K inputs, N outputs. Sums are float32. The norm has no gain: it is multiplied into the weights when they
are packed; what is left of it is one factor per row, which can wait until the sums are made. So the inputs go to the
product as they are, and their squares are summed on the way, or were when they were written.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from omni_ray.engine.kernels.launch import EARLY_ROWS, following, turn

FEW: int = 2
"""Up to so many rows are multiplied one by one, each weight read by vectors; more are a matrix product by tiles."""

FETCHED_INPUTS: Final = 256
"""In tiles that tensor memory access units load."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a product is cut: rows, outputs and inputs at once, and Triton's warps and pipeline stages.

    Attributes:
        fetched: whether tensor memory access units load the tiles; see ``fetches``.
    """

    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int
    fetched: bool = False


def linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    *,
    eps: float | None = None,
    residual: Tensor | None = None,
    gated: bool = False,
    tiles: Tiles | None = None,
    squares: Tensor | None = None,
    squares_left: Tensor | None = None,
) -> None:
    """``out = act(x / rms(x) @ weight.T) + residual``.

    Args:
        x: [M, K]; rows may be apart, their numbers not.
        weight: [N, K], contiguous; gated: [2 N, K], the gate's rows before the others.
        out: [M, N], contiguous; its dtype may be wider than ``x``'s. May be ``residual``.
        eps: of the norm; None for no norm.
        residual: [M, N].
        gated: ``silu(x @ gate.T) * (x @ up.T)``.
        tiles: None takes ``tiles_of``.
        squares: float32 [M, parts], whose sums are those of the squares of ``x``, if its writer left them; not read for
            ``FEW`` rows.
        squares_left: float32 [M, parts], where those of ``out`` are left; not written for ``FEW`` rows. See
            ``parts_of``.
    """
    m, k = x.shape
    n = out.shape[1]
    assert weight.shape == (2 * n if gated else n, k)
    how = tiles or tiles_of(m, n, gated, fetches(x, weight))
    flags = {
        "NORM": eps is not None,
        "RESIDUAL": residual is not None,
        "GATED": gated,
        "BLOCK_N": how.outputs,
        "num_warps": how.warps,
        **following(x),
    }
    rest, small = x if residual is None else residual, eps or 0.0
    if m <= FEW:
        _one_row[(triton.cdiv(n, how.outputs), m)](
            x, weight, rest, out, x.stride(0), n, small, K=k, BLOCK_K=triton.next_power_of_2(k), **flags
        )
        return
    inputs = min(how.inputs, max(16, triton.next_power_of_2(k)))
    grid = (triton.cdiv(n, how.outputs), triton.cdiv(m, how.rows))
    given = squares if eps is not None else None
    parts = 0 if given is None else given.shape[1]
    _rows[grid](
        TensorDescriptor.from_tensor(x, [how.rows, inputs]) if how.fetched else x,
        TensorDescriptor.from_tensor(weight, [how.outputs, inputs]) if how.fetched else weight,
        rest, out, x if given is None else given, x if squares_left is None else squares_left,
        x.stride(0), m, n, small, 0 if given is None else given.stride(0),
        K=k, BLOCK_M=how.rows, BLOCK_K=inputs, EVEN=k % inputs == 0, PRECISION=precision(x.dtype), FETCHED=how.fetched,
        PARTS=parts, BLOCK_P=triton.next_power_of_2(parts), LEAVES=squares_left is not None,
        num_stages=stages(how, x.dtype), **flags,
    )  # fmt: skip


def parts_of(m: int, n: int) -> int:
    """How many sums of squares a product of ``n`` outputs leaves per row: one for each tile."""
    return -(-n // tiles_of(m, n, False, False).outputs)


def fetches(x: Tensor, weight: Tensor) -> bool:
    """Whether tensor memory access units load tiles of ``x`` and ``weight``.

    GPUs since Hopper have them. They want rows at multiples of 16 bytes; more than ``EARLY_ROWS`` rows gain by it.
    """
    return (
        x.is_cuda
        and torch.cuda.get_device_capability(x.device) >= (9, 0)
        and len(x) > EARLY_ROWS
        and x.dtype.itemsize == 2
        and x.shape[1] % FETCHED_INPUTS == 0
        and not (x.data_ptr() | weight.data_ptr() | x.stride(0) * x.dtype.itemsize) % 16
    )


def stages(tiles: Tiles, dtype: torch.dtype) -> int:
    """Pipeline stages: tiles are made for 16-bit numbers, wider ones fill shared memory with fewer."""
    return min(tiles.stages, 2) if dtype == torch.float32 else tiles.stages


def precision(dtype: torch.dtype) -> str:
    """How ``tl.dot`` multiplies: float32 means float32."""
    return "ieee" if dtype == torch.float32 else "tf32"


def tiles_of(m: int, n: int, gated: bool, fetched: bool) -> Tiles:
    """What was fastest on an H200 for the shapes of Qwen3-Omni's talker (benchmarks/h200.md).

    Few rows are multiplied in tiles of 64 all the same: only those take Hopper's wide instructions. Tiles that are
    ``fetched`` have as many outputs as others; see ``parts_of``.
    """
    if m <= FEW:
        return Tiles(1, 8, 0, 4 if n > 2048 or gated else 8, 1)
    wide = gated or n > 2048
    if fetched:
        return Tiles(64, 32 if wide else 16, FETCHED_INPUTS, 4, 3, fetched=True)
    return Tiles(64, 32, 128, 4, 4) if wide else Tiles(64, 16, 128, 4, 6)


@triton.jit
def _one_row(
    x, weight, residual, out, X_ROW, N, eps,
    K: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1)
    cols, ks = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    inside = cols < N
    mask = inside[:, None] & (ks < K)[None, :]
    place = weight + cols[:, None] * K + ks[None, :]
    w = tl.load(place, mask=mask, other=0.0)
    if GATED:
        u = tl.load(place + N * K, mask=mask, other=0.0)
    turn(PDL)
    v = tl.load(x + row * X_ROW + ks, mask=ks < K, other=0.0).to(tl.float32)
    y = tl.sum(w.to(tl.float32) * v[None, :], 1)
    if NORM:
        factor = tl.rsqrt(tl.sum(v * v, 0) / K + eps)
        y *= factor
    if GATED:
        up = tl.sum(u.to(tl.float32) * v[None, :], 1)
        if NORM:
            up *= factor
        y = y * tl.sigmoid(y) * up
    if RESIDUAL:
        y += tl.load(residual + row * N + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * N + cols, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _rows(
    x, weight, residual, out, squares, squares_left, X_ROW, M, N, eps, SQUARES_ROW,
    K: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr, FETCHED: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_P: tl.constexpr, LEAVES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    here, inside = rows < M, cols < N
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    ups = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    own = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    turn(PDL)
    if PARTS > 0:
        part = tl.arange(0, BLOCK_P)
        mask = here[:, None] & (part < PARTS)[None, :]
        given = tl.load(squares + rows[:, None] * SQUARES_ROW + part[None, :], mask=mask, other=0.0)
    for start in range(0, K, BLOCK_K):
        ks = start + tl.arange(0, BLOCK_K)
        if FETCHED:
            w = weight.load([tl.program_id(0) * BLOCK_N, start]).T
            v = x.load([tl.program_id(1) * BLOCK_M, start])
        elif EVEN:
            w = tl.load(weight + cols[None, :] * K + ks[:, None], mask=inside[None, :], other=0.0)
            v = tl.load(x + rows[:, None] * X_ROW + ks[None, :], mask=here[:, None], other=0.0)
        else:
            w = tl.load(weight + cols[None, :] * K + ks[:, None], mask=inside[None, :] & (ks < K)[:, None], other=0.0)
            v = tl.load(x + rows[:, None] * X_ROW + ks[None, :], mask=here[:, None] & (ks < K)[None, :], other=0.0)
        sums = tl.dot(v, w, sums, input_precision=PRECISION)
        if GATED:
            if FETCHED:
                u = weight.load([N + tl.program_id(0) * BLOCK_N, start]).T
            else:
                u = tl.load(
                    weight + (N + cols)[None, :] * K + ks[:, None], mask=inside[None, :] & (ks < K)[:, None], other=0.0
                )
            ups = tl.dot(v, u, ups, input_precision=PRECISION)
        if NORM and PARTS == 0:
            wide = v.to(tl.float32)
            own += wide * wide
    if NORM:
        if PARTS > 0:
            factor = tl.rsqrt(tl.sum(given, 1) / K + eps)[:, None]
        else:
            factor = tl.rsqrt(tl.sum(own, 1) / K + eps)[:, None]
        sums *= factor
        ups *= factor
    if GATED:
        sums = sums * tl.sigmoid(sums) * ups
    mask = here[:, None] & inside[None, :]
    place = rows[:, None] * N + cols[None, :]
    if RESIDUAL:
        sums += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
    result = sums.to(out.dtype.element_ty)
    tl.store(out + place, result, mask=mask)
    if LEAVES:
        wide = tl.where(inside[None, :], result.to(tl.float32), 0.0)
        to = squares_left + rows * tl.num_programs(0) + tl.program_id(0)
        tl.store(to, tl.sum(wide * wide, 1), mask=here)
