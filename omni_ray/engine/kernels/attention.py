"""Decode attention of Qwen3-like layers over the few positions of one code frame: head norms, rotary positions, the
cache write and the attention in one pass. ``slot_attention`` does the same over a table of slots.

Both take packed projections [rows, (heads + 2 groups) d]: queries, keys, values. d numbers per head, of which the first
half is rotated against the second, as transformers' ``rotate_half``.
"""

from dataclasses import dataclass
from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from omni_ray.engine.kernels.launch import following, turn
from omni_ray.engine.kernels.linear import precision

FRAME_WARPS: Final = 4


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each head's query and key: gains [d]."""

    query: Tensor
    key: Tensor
    eps: float


def attend_frame(
    qkv: Tensor,
    norms: HeadNorms,
    rotary: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    out: Tensor,
    scale: float,
    first: int,
) -> None:
    """The next positions of a frame: row ``t`` of M equal groups of rows is position ``first + t``.

    Args:
        qkv: [M t, (heads + 2 groups) d].
        norms: of the layer.
        rotary: cosines and sines [positions, d / 2].
        keys: [M, groups, positions, d], written at the new positions.
        values: likewise.
        out: [M t, heads d].
        scale: of the scores.
        first: positions that the cache holds already.
    """
    m, groups, positions, dim = keys.shape
    heads = out.shape[1] // dim
    _frame[(m, groups)](
        qkv, norms.query, norms.key, *rotary, keys, values, out, norms.eps, scale, first,
        T=len(qkv) // m, HEADS=heads, GROUPS=groups, POSITIONS=positions, D=dim,
        HALF=max(16, triton.next_power_of_2(dim // 2)), BLOCK_D=max(16, triton.next_power_of_2(dim)),
        BLOCK_P=max(16, triton.next_power_of_2(positions)),
        BLOCK_Q=max(16, triton.next_power_of_2(heads // groups)),
        PRECISION=precision(keys.dtype), num_warps=FRAME_WARPS, **following(qkv),
    )  # fmt: skip


@triton.jit
def turned(a, b, squares, gain_a, gain_b, cos, sin, eps, D: tl.constexpr):
    """Both halves of heads, float32: normed by their sum of ``squares``, then turned against each other."""
    factor = tl.rsqrt(squares / D + eps)
    a = a * factor * gain_a
    b = b * factor * gain_b
    return a * cos - b * sin, b * cos + a * sin


@triton.jit(do_not_specialize=["first"])
def _frame(
    qkv, q_gain, k_gain, cosines, sines, keys, values, out, eps, scale, first,
    T: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, POSITIONS: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr,
    PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    m, group = tl.program_id(0), tl.program_id(1)
    PER: tl.constexpr = HEADS // GROUPS
    low, wide, past, heads = tl.arange(0, HALF), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_Q)
    turning, whole, mine = low < D // 2, wide < D, heads < PER
    kg_a = tl.load(k_gain + low, mask=turning, other=0.0).to(tl.float32)
    kg_b = tl.load(k_gain + D // 2 + low, mask=turning, other=0.0).to(tl.float32)
    qg_a = tl.load(q_gain + low, mask=turning, other=0.0).to(tl.float32)[None, :]
    qg_b = tl.load(q_gain + D // 2 + low, mask=turning, other=0.0).to(tl.float32)[None, :]
    cache = (m * GROUPS + group) * POSITIONS * D
    dtype = keys.dtype.element_ty
    turn(PDL)
    for i in tl.static_range(T):
        position = first + i
        row = qkv + (m * T + i) * ((HEADS + 2 * GROUPS) * D)
        # All loads first, so that they wait for memory together.
        seen = past < position
        mask = turning[:, None] & seen[None, :]
        at = cache + past[None, :] * D + low[:, None]
        k_a = tl.load(keys + at, mask=mask, other=0.0)
        k_b = tl.load(keys + at + D // 2, mask=mask, other=0.0)
        at = cache + past[:, None] * D + wide[None, :]
        v = tl.load(values + at, mask=seen[:, None] & whole[None, :], other=0.0)
        cos = tl.load(cosines + position * (D // 2) + low, mask=turning, other=0.0).to(tl.float32)
        sin = tl.load(sines + position * (D // 2) + low, mask=turning, other=0.0).to(tl.float32)
        k_at = (HEADS + group) * D + low
        c = tl.load(row + k_at, mask=turning, other=0.0).to(tl.float32)
        d = tl.load(row + k_at + D // 2, mask=turning, other=0.0).to(tl.float32)
        v_new = tl.load(row + (HEADS + GROUPS + group) * D + wide, mask=whole, other=0.0)
        q_at = (group * PER + heads)[:, None] * D + low[None, :]
        mask = mine[:, None] & turning[None, :]
        a = tl.load(row + q_at, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(row + q_at + D // 2, mask=mask, other=0.0).to(tl.float32)

        c, d = turned(c, d, tl.sum(c * c + d * d, 0), kg_a, kg_b, cos, sin, eps, D)
        a, b = turned(a, b, tl.sum(a * a + b * b, 1)[:, None], qg_a, qg_b, cos[None, :], sin[None, :], eps, D)
        a, b, c, d = a.to(dtype), b.to(dtype), c.to(dtype), d.to(dtype)
        here = cache + position * D
        tl.store(keys + here + low, c, mask=turning)
        tl.store(keys + here + D // 2 + low, d, mask=turning)
        tl.store(values + here + wide, v_new, mask=whole)

        scores = tl.dot(a, k_a, input_precision=PRECISION)
        scores = tl.dot(b, k_b, scores, input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        c, d = c.to(tl.float32)[None, :], d.to(tl.float32)[None, :]
        score = tl.sum(a.to(tl.float32) * c + b.to(tl.float32) * d, 1) * scale
        top = tl.maximum(tl.max(scores, 1), score)
        weights, weight = tl.exp(scores - top[:, None]), tl.exp(score - top)
        mixed = tl.dot(weights.to(dtype), v, input_precision=PRECISION)
        mixed += weight[:, None] * v_new.to(tl.float32)[None, :]
        mixed = mixed / (tl.sum(weights, 1) + weight)[:, None]
        to = (m * T + i) * (HEADS * D) + (group * PER + heads)[:, None] * D + wide[None, :]
        tl.store(out + to, mixed.to(out.dtype.element_ty), mask=mine[:, None] & whole[None, :])
        if i + 1 < T:
            tl.debug_barrier()  # the next position reads this one from the cache
