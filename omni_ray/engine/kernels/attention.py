"""Decode attention of Qwen3-like layers: head norms, rotary positions, the cache write and the attention in one pass.

``attend_slots`` looks at a table of slots, each row at its own live length, split along the keys; ``attend_frame`` at
the few positions of one code frame. Both take packed projections [rows, (heads + 2 groups) d]: queries, keys, values.

d numbers per head, of which the first half is rotated against the second, as transformers' ``rotate_half``.
"""

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from omni_ray.engine.kernels.launch import following, turn
from omni_ray.engine.kernels.linear import precision
from omni_ray.engine.kernels.rows import ROW_WORDS

FRAME_WARPS: Final = 4


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms of each head's query and key: gains [d]."""

    query: Tensor
    key: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Partials:
    """What the splits of a row's keys leave: weighted values [M, heads, splits, d], maxima and sums of the weights."""

    values: Tensor
    maxima: Tensor
    sums: Tensor

    @classmethod
    def empty(cls, rows: int, heads: int, splits: int, dim: int, device: torch.device) -> "Partials":
        """All float32."""
        return cls(
            torch.empty(rows, heads, splits, dim, device=device),
            torch.empty(rows, heads, splits, device=device),
            torch.empty(rows, heads, splits, device=device),
        )


def attend_slots(
    qkv: Tensor,
    rows: Tensor,
    norms: HeadNorms,
    rotary: tuple[Tensor, Tensor],
    keys: Tensor,
    values: Tensor,
    partials: Partials,
    out: Tensor,
    scale: float,
) -> None:
    """One new position per row, over its slot's cache; its key and value are written there, unless it is nobody's.

    Args:
        qkv: [M, (heads + 2 groups) d].
        rows: see ``rows``.
        norms: of the layer.
        rotary: cosines and sines [M, d / 2], in the dtype that they are to be rounded to.
        keys: [slots, groups, length, d] of the layer.
        values: likewise.
        partials: scratch.
        out: [M, heads d].
        scale: of the scores.
    """
    m, heads, splits, dim = partials.values.shape
    groups, length = keys.shape[1], keys.shape[2]
    grid = (m, groups, splits)
    half = max(16, triton.next_power_of_2(dim // 2))
    _slots[grid](
        qkv, rows, norms.query, norms.key, *rotary, keys, values,
        partials.values, partials.maxima, partials.sums, norms.eps, scale, length,
        WORDS=ROW_WORDS, HEADS=heads, GROUPS=groups, SPLITS=splits, D=dim, HALF=half,
        BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK_Q=max(16, triton.next_power_of_2(heads // groups)),
        BLOCK_T=64,
        PRECISION=precision(keys.dtype), num_warps=4, num_stages=2 if keys.element_size() > 2 else 3, **following(qkv),
    )  # fmt: skip
    _join[(m, heads)](
        partials.values, partials.maxima, partials.sums, out,
        SPLITS=splits, D=dim, BLOCK_D=triton.next_power_of_2(dim), num_warps=1, **following(qkv),
    )  # fmt: skip


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
def _turned(a, b, squares, gain_a, gain_b, cos, sin, eps, D: tl.constexpr):
    """Both halves of heads, float32: normed by their sum of ``squares``, then turned against each other."""
    factor = tl.rsqrt(squares / D + eps)
    a = a * factor * gain_a
    b = b * factor * gain_b
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def _slots(
    qkv, rows, q_gain, k_gain, cosines, sines, keys, values, out_values, out_maxima, out_sums, eps, scale, length,
    WORDS: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    m, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    PER: tl.constexpr = HEADS // GROUPS
    turn(PDL)
    slot, position = tl.load(rows + m * WORDS), tl.load(rows + m * WORDS + 3)
    active = slot >= 0
    low, wide, heads = tl.arange(0, HALF), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_Q)
    turning, whole = low < D // 2, wide < D
    cos = tl.load(cosines + m * (D // 2) + low, mask=turning, other=0.0).to(tl.float32)
    sin = tl.load(sines + m * (D // 2) + low, mask=turning, other=0.0).to(tl.float32)

    row = qkv + m * ((HEADS + 2 * GROUPS) * D)
    ok = (heads < PER)[:, None] & turning[None, :]
    at = (group * PER + heads)[:, None] * D + low[None, :]
    a = tl.load(row + at, mask=ok, other=0.0).to(tl.float32)
    b = tl.load(row + at + D // 2, mask=ok, other=0.0).to(tl.float32)
    gain_a = tl.load(q_gain + low, mask=turning, other=0.0).to(tl.float32)
    gain_b = tl.load(q_gain + D // 2 + low, mask=turning, other=0.0).to(tl.float32)
    a, b = _turned(
        a, b, tl.sum(a * a + b * b, 1)[:, None], gain_a[None, :], gain_b[None, :], cos[None, :], sin[None, :], eps, D
    )
    dtype = keys.dtype.element_ty
    a, b = a.to(dtype), b.to(dtype)

    place = (tl.maximum(slot, 0).to(tl.int64) * GROUPS + group) * length * D
    own = tl.cdiv(tl.cdiv(position, SPLITS), BLOCK_T) * BLOCK_T
    begin = split * own
    end = tl.minimum(begin + own, position)
    top = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    mixed = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        seen = t < end
        mask = turning[:, None] & seen[None, :]
        k_a = tl.load(keys + place + t[None, :] * D + low[:, None], mask=mask, other=0.0)
        k_b = tl.load(keys + place + t[None, :] * D + D // 2 + low[:, None], mask=mask, other=0.0)
        scores = tl.dot(a, k_a, input_precision=PRECISION)
        scores = tl.dot(b, k_b, scores, input_precision=PRECISION) * scale
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp(top - higher)
        weights = tl.exp(scores - higher[:, None])
        v = tl.load(values + place + t[:, None] * D + wide[None, :], mask=seen[:, None] & whole[None, :], other=0.0)
        mixed = tl.dot(weights.to(dtype), v, mixed * shrink[:, None], input_precision=PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        top = higher

    if split == SPLITS - 1:  # the new position: from the projections, and into the cache
        k_at = (HEADS + group) * D + low
        c = tl.load(row + k_at, mask=turning, other=0.0).to(tl.float32)
        d = tl.load(row + k_at + D // 2, mask=turning, other=0.0).to(tl.float32)
        gain_a = tl.load(k_gain + low, mask=turning, other=0.0).to(tl.float32)
        gain_b = tl.load(k_gain + D // 2 + low, mask=turning, other=0.0).to(tl.float32)
        c, d = _turned(c, d, tl.sum(c * c + d * d, 0), gain_a, gain_b, cos, sin, eps, D)
        c, d = c.to(dtype), d.to(dtype)
        v_new = tl.load(row + (HEADS + GROUPS + group) * D + wide, mask=whole, other=0.0)
        here = place + position.to(tl.int64) * D
        tl.store(keys + here + low, c, mask=turning & active)
        tl.store(keys + here + D // 2 + low, d, mask=turning & active)
        tl.store(values + here + wide, v_new, mask=whole & active)
        c, d = c.to(tl.float32)[None, :], d.to(tl.float32)[None, :]
        score = tl.sum(a.to(tl.float32) * c + b.to(tl.float32) * d, 1) * scale
        higher = tl.maximum(top, score)
        shrink = tl.exp(top - higher)
        weight = tl.exp(score - higher)
        mixed = mixed * shrink[:, None] + weight[:, None] * v_new.to(tl.float32)[None, :]
        total = total * shrink + weight
        top = higher

    at = (m * HEADS + group * PER + heads) * SPLITS + split
    tl.store(out_maxima + at, top, mask=heads < PER)
    tl.store(out_sums + at, total, mask=heads < PER)
    tl.store(out_values + at[:, None] * D + wide[None, :], mixed, mask=(heads < PER)[:, None] & whole[None, :])


@triton.jit
def _join(partial, maxima, sums, out, SPLITS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PDL: tl.constexpr):
    """Weigh the splits of one head against each other; those without keys have a maximum of -inf."""
    head = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    splits, wide = tl.arange(0, SPLITS), tl.arange(0, BLOCK_D)
    turn(PDL)
    top = tl.load(maxima + head * SPLITS + splits)
    factor = tl.exp(top - tl.max(top, 0))
    total = tl.sum(tl.load(sums + head * SPLITS + splits) * factor, 0)
    at = (head * SPLITS + splits)[:, None] * D + wide[None, :]
    part = tl.load(partial + at, mask=(wide < D)[None, :], other=0.0)
    mixed = tl.sum(part * factor[:, None], 0) / total
    tl.store(out + head * D + wide, mixed.to(out.dtype.element_ty), mask=wide < D)


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

        c, d = _turned(c, d, tl.sum(c * c + d * d, 0), kg_a, kg_b, cos, sin, eps, D)
        a, b = _turned(a, b, tl.sum(a * a + b * b, 1)[:, None], qg_a, qg_b, cos[None, :], sin[None, :], eps, D)
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
