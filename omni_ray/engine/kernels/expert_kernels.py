"""The kernels of ``experts``: routing, and the two products of experts for one row and for many."""

import triton
import triton.language as tl

from omni_ray.engine.kernels.launch import turn


@triton.jit
def route(
    x, rows, logits, experts, weights, factors, lists, counts, eps,
    WORDS: tl.constexpr, M: tl.constexpr, H: tl.constexpr, ROUTED: tl.constexpr, SHARED: tl.constexpr,
    CHOSEN: tl.constexpr, NORMALISED: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose each row's experts and their weights, and list the assignments of each expert."""
    m = tl.program_id(0)
    e, h = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_H)
    turn(PDL)
    active = tl.load(rows + m * WORDS) >= 0
    v = tl.load(x + m * H + h, mask=h < H, other=0.0).to(tl.float32)
    tl.store(factors + m, tl.rsqrt(tl.sum(v * v, 0) / H + eps))
    row = logits + m * (ROUTED + 1)
    values = tl.load(row + e, mask=e < ROUTED, other=-float("inf"))
    shared = tl.sigmoid(tl.load(row + ROUTED))
    shares = tl.exp(values - tl.max(values, 0))
    shares = shares / tl.sum(shares, 0)
    active = active & (tl.sum(tl.where(shares == shares, 0, 1), 0) == 0)  # numbers that are none go to no expert
    left, total = shares, 0.0
    for _ in tl.static_range(CHOSEN):
        best = tl.argmax(left, 0)
        total += tl.sum(tl.where(e == best, shares, 0.0), 0)
        left = tl.where(e == best, -1.0, left)
    scale = 1.0 / total if NORMALISED else 1.0
    at = m * (CHOSEN + SHARED)
    left = shares
    for j in tl.static_range(CHOSEN):
        best = tl.argmax(left, 0).to(tl.int32)
        tl.store(weights + at + j, tl.sum(tl.where(e == best, shares, 0.0), 0) * scale)
        left = tl.where(e == best, -1.0, left)
        _assign(experts, lists, counts, at + j, best, active, M)
    for j in tl.static_range(SHARED):
        tl.store(weights + at + CHOSEN + j, shared)
        _assign(experts, lists, counts, at + CHOSEN + j, ROUTED + j, active, M)


@triton.jit
def _assign(experts, lists, counts, assignment, expert, active, M: tl.constexpr):
    tl.store(experts + assignment, tl.where(active, expert, -1))
    if M > 1:
        place = tl.atomic_add(counts + expert, 1, mask=active, sem="relaxed")
        tl.store(lists + expert * M + place, assignment, mask=active)


@triton.jit
def up_one(
    x, up, experts, factors, inner,
    H: tl.constexpr, WIDTH: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row: gate and up projections of its experts."""
    a = tl.program_id(1)
    cols, ks = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    turn(PDL)
    expert = tl.load(experts + a)
    mask = ((cols < WIDTH) & (expert >= 0))[:, None] & (ks < H)[None, :]
    place = up + (tl.maximum(expert, 0).to(tl.int64) * (2 * WIDTH) + cols)[:, None] * H + ks[None, :]
    g = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(place + WIDTH * H, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(x + ks, mask=ks < H, other=0.0).to(tl.float32)[None, :]
    factor = tl.load(factors)
    gate = tl.sum(g * v, 1) * factor
    y = gate * tl.sigmoid(gate) * tl.sum(u * v, 1) * factor
    tl.store(inner + a * WIDTH + cols, y.to(inner.dtype.element_ty), mask=cols < WIDTH)


@triton.jit
def down_one(
    inner, down, experts, weights, x,
    H: tl.constexpr, WIDTH: tl.constexpr, A: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row: down projections of its experts, weighted and added to ``x``."""
    cols, ks = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    sums = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    turn(PDL)
    for a in tl.static_range(A):
        expert = tl.load(experts + a)
        mask = ((cols < H) & (expert >= 0))[:, None] & (ks < WIDTH)[None, :]
        place = down + (tl.maximum(expert, 0).to(tl.int64) * H + cols)[:, None] * WIDTH + ks[None, :]
        w = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        v = tl.load(inner + a * WIDTH + ks, mask=ks < WIDTH, other=0.0).to(tl.float32) * tl.load(weights + a)
        sums += w * v[None, :]
    y = tl.sum(sums, 1) + tl.load(x + cols, mask=cols < H, other=0.0).to(tl.float32)
    tl.store(x + cols, y.to(x.dtype.element_ty), mask=cols < H)


@triton.jit
def up_grouped(
    x, up, factors, lists, counts, inner,
    E: tl.constexpr, M: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, A: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gate and up projections of one expert for the rows that chose it."""
    expert = E - 1 - tl.program_id(1)  # shared ones have the most rows: they begin
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < WIDTH
    base = (expert.to(tl.int64) * (2 * WIDTH) + cols)[None, :] * H
    turn(PDL)
    count = tl.load(counts + expert)
    for first in range(0, count, BLOCK_M):
        j = first + tl.arange(0, BLOCK_M)
        ok = j < count
        a = tl.load(lists + expert * M + j, mask=ok, other=0)
        gates = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        ups = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, H, BLOCK_K):
            ks = start + tl.arange(0, BLOCK_K)
            mask = (ks < H)[:, None] & inside[None, :]
            v = tl.load(x + (a // A)[:, None] * H + ks[None, :], mask=ok[:, None] & (ks < H)[None, :], other=0.0)
            g = tl.load(up + base + ks[:, None], mask=mask, other=0.0)
            u = tl.load(up + base + WIDTH * H + ks[:, None], mask=mask, other=0.0)
            gates = tl.dot(v, g, gates, input_precision=PRECISION)
            ups = tl.dot(v, u, ups, input_precision=PRECISION)
        factor = tl.load(factors + a // A)[:, None]
        gates *= factor
        y = gates * tl.sigmoid(gates) * ups * factor
        to = inner + a[:, None] * WIDTH + cols[None, :]
        tl.store(to, y.to(inner.dtype.element_ty), mask=ok[:, None] & inside[None, :])


@triton.jit
def down_grouped(
    inner, down, weights, lists, counts, parts,
    E: tl.constexpr, M: tl.constexpr, H: tl.constexpr, WIDTH: tl.constexpr, A: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Down projections of one expert, weighted, into a row per assignment."""
    expert = E - 1 - tl.program_id(1)
    cols = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = cols < H
    base = (expert.to(tl.int64) * H + cols)[None, :] * WIDTH
    turn(PDL)
    count = tl.load(counts + expert)
    for first in range(0, count, BLOCK_M):
        j = first + tl.arange(0, BLOCK_M)
        ok = j < count
        a = tl.load(lists + expert * M + j, mask=ok, other=0)
        sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, WIDTH, BLOCK_K):
            ks = start + tl.arange(0, BLOCK_K)
            v = tl.load(inner + a[:, None] * WIDTH + ks[None, :], mask=ok[:, None] & (ks < WIDTH)[None, :], other=0.0)
            w = tl.load(down + base + ks[:, None], mask=(ks < WIDTH)[:, None] & inside[None, :], other=0.0)
            sums = tl.dot(v, w, sums, input_precision=PRECISION)
        sums *= tl.load(weights + a, mask=ok, other=0.0)[:, None]
        tl.store(parts + a[:, None] * H + cols[None, :], sums, mask=ok[:, None] & inside[None, :])


@triton.jit
def collect(
    parts, experts, x, squares_left,
    H: tl.constexpr, A: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_N: tl.constexpr, LEAVES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Add a row's assignments to ``x``, and leave the sum of its squares."""
    m = tl.program_id(0)
    cols, a = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_A)
    turn(PDL)
    there = tl.load(experts + m * A + a, mask=a < A, other=-1) >= 0
    mask = there[:, None] & (cols < H)[None, :]
    part = tl.load(parts + (m * A + a)[:, None] * H + cols[None, :], mask=mask, other=0.0)
    y = tl.sum(part, 0) + tl.load(x + m * H + cols, mask=cols < H, other=0.0).to(tl.float32)
    result = y.to(x.dtype.element_ty)
    tl.store(x + m * H + cols, result, mask=cols < H)
    if LEAVES:
        wide = result.to(tl.float32)
        tl.store(squares_left + m * tl.num_programs(1) + tl.program_id(1), tl.sum(wide * wide, 0))
