"""Decode attention over a table of slots, each row at its own live length, split along the keys; see ``attention``.

The slots' keys and values are of the model's dtype, or e4m3 with a scale per head and position (``KVTable``).
"""

from dataclasses import dataclass
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from omni_ray.engine.kernels.attention import HeadNorms, turned
from omni_ray.engine.kernels.launch import following, turn
from omni_ray.engine.kernels.linear import precision
from omni_ray.engine.kernels.rows import ROW_WORDS
from omni_ray.engine.kv_table import E4M3_LARGEST, SMALLEST_SCALE, KVTable

LARGEST: Final = tl.constexpr(E4M3_LARGEST)
SMALLEST: Final = tl.constexpr(SMALLEST_SCALE)


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


@dataclass(frozen=True, slots=True)
class SlotTiles:
    """How the attention over slots is cut: positions at once, and Triton's warps and pipeline stages."""

    positions: int
    warps: int
    stages: int


def attend_slots(
    qkv: Tensor,
    rows: Tensor,
    norms: HeadNorms,
    rotary: tuple[Tensor, Tensor],
    keys: KVTable,
    values: KVTable,
    layer: int,
    partials: Partials,
    out: Tensor,
    scale: float,
    tiles: SlotTiles | None = None,
) -> None:
    """One new position per row, over its slot's cache; its key and value are written there, unless it is nobody's.

    What an 8-bit cache holds is multiplied in float16 where the model is bfloat16: e4m3 fits into both, float16 is made
    from it in one instruction, and weights below 1 and normed queries need no wider exponent.

    Args:
        qkv: [M, (heads + 2 groups) d].
        rows: see ``rows``.
        norms: of the layer.
        rotary: cosines and sines [M, d / 2], in the dtype that they are to be rounded to.
        keys: of all layers.
        values: likewise.
        layer: which of them.
        partials: scratch.
        out: [M, heads d].
        scale: of the scores.
        tiles: None takes ``slot_tiles``.
    """
    m, heads, splits, dim = partials.values.shape
    k, v = keys.numbers[layer], values.numbers[layer]
    groups, length = k.shape[1], k.shape[2]
    fp8 = keys.scales is not None
    if fp8:
        k, v = k.view(torch.int16), v.view(torch.int16)
    # Without scales the kernel follows no pointer to them.
    k_scales = k if keys.scales is None else keys.scales[layer]
    v_scales = v if values.scales is None else values.scales[layer]
    grid = (m, groups, splits)
    half = max(16, triton.next_power_of_2(dim // 2))
    how = tiles or slot_tiles(qkv.dtype, fp8)
    _slots[grid](
        qkv, rows, norms.query, norms.key, *rotary, k, v, k_scales, v_scales,
        partials.values, partials.maxima, partials.sums, norms.eps, scale, length,
        WORDS=ROW_WORDS, HEADS=heads, GROUPS=groups, SPLITS=splits, D=dim, HALF=half,
        BLOCK_D=max(16, triton.next_power_of_2(dim)), BLOCK_Q=max(16, triton.next_power_of_2(heads // groups)),
        BLOCK_T=how.positions, FP8=fp8, MATH=_math(qkv.dtype, fp8), NATIVE=qkv.is_cuda,
        PRECISION=precision(qkv.dtype), num_warps=how.warps, num_stages=how.stages, **following(qkv),
    )  # fmt: skip
    _join[(m, heads)](
        partials.values, partials.maxima, partials.sums, out,
        SPLITS=splits, D=dim, BLOCK_D=triton.next_power_of_2(dim), num_warps=1, **following(qkv),
    )  # fmt: skip


def slot_tiles(dtype: torch.dtype, fp8: bool) -> SlotTiles:
    """What was fastest on an H200 at 64 rows (benchmarks/h200.md)."""
    if dtype == torch.float32:
        return SlotTiles(64, 4, 2)
    return SlotTiles(64, 2 if fp8 else 4, 3)


def splits_of(m: int, groups: int, fp8: bool) -> int:
    """Into how many splits each of ``m`` rows' positions go: at most 64, and no more than run on a GPU at once."""
    programs = 512 if fp8 else 256  # an H200's 132 multiprocessors hold the tiles of 2 each, of 4 if they are of 8 bits
    return min(64, 1 << (max(1, programs // (m * groups)).bit_length() - 1))


def _math(dtype: torch.dtype, fp8: bool) -> Any:
    """What matrices are multiplied in."""
    if dtype == torch.float32:
        return tl.float32
    return tl.float16 if fp8 else tl.bfloat16


@triton.jit
def _unpacked(pairs, MATH: tl.constexpr, NATIVE: tl.constexpr):
    """Two tables of numbers, of a table of two e4m3 in 16 bits each."""
    if NATIVE:  # four at a time: Triton by itself would take nine instructions for each
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 l, h;
            .reg .b16 a, b, c;
            prmt.b32 l, $2, 0, 0x4420;
            prmt.b32 h, $2, 0, 0x4431;
            mov.b32 {a, c}, l;
            mov.b32 {b, c}, h;
            cvt.rn.f16x2.e4m3x2 $0, a;
            cvt.rn.f16x2.e4m3x2 $1, b;
            }""",
            "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        # An e4m3's exponent and mantissa are those of a float16, but for the exponent's bias and where they stand.
        low = (((pairs << 8) & -0x8000) | ((pairs << 7) & 0x3F80)).to(tl.float16, bitcast=True) * 256
        high = ((pairs & -0x8000) | ((pairs >> 1) & 0x3F80)).to(tl.float16, bitcast=True) * 256
    return low.to(MATH), high.to(MATH)


@triton.jit
def _keep(a, b, numbers, scales, at, low, mask, active, D: tl.constexpr):
    """Write both halves of a head as e4m3 to position ``at`` of all; what they are afterwards, float32."""
    largest = tl.maximum(tl.max(tl.abs(a), 0), tl.max(tl.abs(b), 0))
    scale = tl.maximum(largest, SMALLEST) / LARGEST
    total = tl.sum(a, 0) + tl.sum(b, 0)
    scale = tl.where(total - total == 0, scale, float("nan"))
    tl.store(scales + at, scale, mask=active)
    a, b = tl.div_rn(a, scale).to(tl.float8e4nv), tl.div_rn(b, scale).to(tl.float8e4nv)
    place = numbers.to(tl.pointer_type(tl.float8e4nv)) + at * D + 2 * low
    tl.store(place, a, mask=mask & active)
    tl.store(place + 1, b, mask=mask & active)
    return a.to(tl.float32) * scale, b.to(tl.float32) * scale


@triton.jit
def _slots(
    qkv, rows, q_gain, k_gain, cosines, sines, keys, values, key_scales, value_scales,
    out_values, out_maxima, out_sums, eps, scale, length,
    WORDS: tl.constexpr, HEADS: tl.constexpr, GROUPS: tl.constexpr, SPLITS: tl.constexpr, D: tl.constexpr,
    HALF: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr, FP8: tl.constexpr,
    MATH: tl.constexpr, NATIVE: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
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
    a, b = turned(
        a, b, tl.sum(a * a + b * b, 1)[:, None], gain_a[None, :], gain_b[None, :], cos[None, :], sin[None, :], eps, D
    )
    dtype = qkv.dtype.element_ty
    a, b = a.to(dtype).to(MATH), b.to(dtype).to(MATH)

    line = (tl.maximum(slot, 0).to(tl.int64) * GROUPS + group) * length
    place = line * D
    own = tl.cdiv(tl.cdiv(position, SPLITS), BLOCK_T) * BLOCK_T
    begin = split * own
    end = tl.minimum(begin + own, position)
    top = tl.full([BLOCK_Q], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    mixed = tl.zeros([BLOCK_Q, HALF if FP8 else BLOCK_D], tl.float32)
    other = tl.zeros([BLOCK_Q, HALF], tl.float32)  # with FP8: the second half
    for start in range(begin, end, BLOCK_T):
        t = start + tl.arange(0, BLOCK_T)
        seen = t < end
        mask = turning[:, None] & seen[None, :]
        if FP8:
            pairs = tl.load(keys + (line + t[None, :]) * (D // 2) + low[:, None], mask=mask, other=0)
            k_a, k_b = _unpacked(pairs, MATH, NATIVE)
        else:
            k_a = tl.load(keys + place + t[None, :] * D + low[:, None], mask=mask, other=0.0)
            k_b = tl.load(keys + place + t[None, :] * D + D // 2 + low[:, None], mask=mask, other=0.0)
        scores = tl.dot(a, k_a, input_precision=PRECISION)
        scores = tl.dot(b, k_b, scores, input_precision=PRECISION) * scale
        if FP8:
            scores *= tl.load(key_scales + line + t, mask=seen, other=0.0)[None, :]
        scores = tl.where(seen[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shrink = tl.exp(top - higher)
        weights = tl.exp(scores - higher[:, None])
        total = total * shrink + tl.sum(weights, 1)
        if FP8:  # times the format's largest number until the end, so that float16 holds it
            mask = seen[:, None] & turning[None, :]
            pairs = tl.load(values + (line + t[:, None]) * (D // 2) + low[None, :], mask=mask, other=0)
            v_a, v_b = _unpacked(pairs, MATH, NATIVE)
            weights *= tl.load(value_scales + line + t, mask=seen, other=0.0)[None, :] * LARGEST
            mixed = tl.dot(weights.to(MATH), v_a, mixed * shrink[:, None], input_precision=PRECISION)
            other = tl.dot(weights.to(MATH), v_b, other * shrink[:, None], input_precision=PRECISION)
        else:
            v = tl.load(values + place + t[:, None] * D + wide[None, :], mask=seen[:, None] & whole[None, :], other=0.0)
            mixed = tl.dot(weights.to(MATH), v, mixed * shrink[:, None], input_precision=PRECISION)
        top = higher
    if FP8:
        mixed /= LARGEST
        other /= LARGEST

    if split == SPLITS - 1:  # the new position: from the projections, and into the cache
        k_at = (HEADS + group) * D + low
        c = tl.load(row + k_at, mask=turning, other=0.0).to(tl.float32)
        d = tl.load(row + k_at + D // 2, mask=turning, other=0.0).to(tl.float32)
        gain_a = tl.load(k_gain + low, mask=turning, other=0.0).to(tl.float32)
        gain_b = tl.load(k_gain + D // 2 + low, mask=turning, other=0.0).to(tl.float32)
        c, d = turned(c, d, tl.sum(c * c + d * d, 0), gain_a, gain_b, cos, sin, eps, D)
        c, d = c.to(dtype).to(tl.float32), d.to(dtype).to(tl.float32)
        v_at = row + (HEADS + GROUPS + group) * D
        new = line + position
        if FP8:
            c, d = _keep(c, d, keys, key_scales, new, low, turning, active, D)
            v_a = tl.load(v_at + low, mask=turning, other=0.0).to(tl.float32)
            v_b = tl.load(v_at + D // 2 + low, mask=turning, other=0.0).to(tl.float32)
            v_a, v_b = _keep(v_a, v_b, values, value_scales, new, low, turning, active, D)
        else:
            v_a = tl.load(v_at + wide, mask=whole, other=0.0).to(tl.float32)
            v_b = v_a
            tl.store(keys + new * D + low, c.to(dtype), mask=turning & active)
            tl.store(keys + new * D + D // 2 + low, d.to(dtype), mask=turning & active)
            tl.store(values + new * D + wide, v_a.to(dtype), mask=whole & active)
        score = tl.sum(a.to(tl.float32) * c[None, :] + b.to(tl.float32) * d[None, :], 1) * scale
        higher = tl.maximum(top, score)
        shrink = tl.exp(top - higher)
        weight = tl.exp(score - higher)
        mixed = mixed * shrink[:, None] + weight[:, None] * v_a[None, :]
        if FP8:
            other = other * shrink[:, None] + weight[:, None] * v_b[None, :]
        total = total * shrink + weight
        top = higher

    at = (m * HEADS + group * PER + heads) * SPLITS + split
    mine = heads < PER
    tl.store(out_maxima + at, top, mask=mine)
    tl.store(out_sums + at, total, mask=mine)
    if FP8:
        to = out_values + at[:, None] * D + low[None, :]
        tl.store(to, mixed, mask=mine[:, None] & turning[None, :])
        tl.store(to + D // 2, other, mask=mine[:, None] & turning[None, :])
    else:
        tl.store(out_values + at[:, None] * D + wide[None, :], mixed, mask=mine[:, None] & whole[None, :])


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
