"""Which ids may be drawn, and which is: top-k, top-p and the Gumbel draw, inside one Triton program.

Keys are int64 that order as (logit, then lower id) and are all different, so no threshold is ambiguous.
"""

import triton
import triton.language as tl

from omni_ray.engine.kernels.noise import gumbel

CANDIDATES = 64
"""``draw_among_few`` takes at most so large a ``top_k``."""

ID_BITS = 12
"""Ids must be below 2**12."""

_LAST_ID = tl.constexpr((1 << ID_BITS) - 1)
_ID_BITS = tl.constexpr(ID_BITS)
_TRIES = tl.constexpr(24)


@triton.jit
def _keys(z, ids):
    bits = z.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << _ID_BITS) + (_LAST_ID - ids)


@triton.jit
def _above(key, least, most):
    """A threshold that at least ``least`` and at most ``most`` keys exceed; fewer than ``least`` exist never."""
    low, high = tl.min(key, 0) - 1, tl.max(key, 0)
    middle = low
    above = tl.sum((key > middle).to(tl.int32), 0)
    while (above < least) | (above > most):
        middle = (low + high) >> 1
        above = tl.sum((key > middle).to(tl.int32), 0)
        if above > most:
            low = middle
        else:
            high = middle
    return middle


@triton.jit
def draw_among_few(
    z, ids, few_logits, few_ids, top_k, top_p, heat, seed_low, seed_high, frame, codebook, FEW: tl.constexpr
):
    """The id drawn from logits ``z`` (-inf: ruled out) with ``top_k`` at most ``FEW``; scratch [FEW] each."""
    high = tl.max(z, 0)
    low = tl.min(tl.where(z > -float("inf"), z, high), 0)
    low = low - (high - low) * 0.001 - 1e-30
    middle, tries = low, 0
    above = tl.sum((z > middle).to(tl.int32), 0)
    while ((above > FEW) | ((above < top_k) & (middle > low))) & (tries < _TRIES):
        middle = 0.5 * (low + high)
        above = tl.sum((z > middle).to(tl.int32), 0)
        if above > FEW:
            low = middle
        else:
            high = middle
        tries += 1
    chosen = z > middle
    if (above > FEW) | ((above < top_k) & (tries > 0)):  # many equal logits: with ids, no two are equal
        key = _keys(z, ids)
        chosen = key > _above(key, top_k, FEW)
    one = chosen.to(tl.int32)
    count = tl.sum(one, 0)
    at = tl.cumsum(one, 0) - 1
    tl.debug_barrier()
    tl.store(few_logits + at, z, mask=chosen)
    tl.store(few_ids + at, ids, mask=chosen)
    tl.debug_barrier()
    lane = tl.arange(0, FEW)
    there = lane < count
    z = tl.load(few_logits + lane, mask=there, other=-float("inf"))
    ids = tl.load(few_ids + lane, mask=there, other=_LAST_ID)
    key = tl.where(there, _keys(z, ids), -(1 << 62) - lane.to(tl.int64))
    larger = key[None, :] > key[:, None]
    kept = there & (tl.sum(larger.to(tl.int32), 1) < top_k)
    scaled = tl.where(kept, z / heat, -float("inf"))
    if top_p < 1.0:
        share = tl.exp(scaled - tl.max(scaled, 0))
        share = share / tl.sum(share, 0)
        # As float32 sums can be in another order only: the cut may differ where they tie with top_p in the last bit.
        before = tl.sum(tl.where(larger, share[None, :], 0.0), 1)
        kept = kept & (before < top_p)
    score = scaled + gumbel(seed_low, seed_high, frame, codebook, ids)
    best = tl.argmax(tl.where(kept, score, -float("inf")), 0)
    return tl.sum(tl.where(lane == best, ids, 0), 0).to(tl.int32)


@triton.jit
def draw_among_all(z, ids, inside, top_k, top_p, heat, seed_low, seed_high, frame, codebook, V: tl.constexpr):
    """The same for any ``top_k`` up to V, with noise for every id."""
    key = _keys(z, ids)
    low = _above(tl.where(inside, key, -(1 << 60) - ids.to(tl.int64)), top_k, top_k)
    kept = inside & (key > low)
    scaled = tl.where(kept, z / heat, -float("inf"))
    if top_p < 1.0:
        share = tl.exp(scaled - tl.max(scaled, 0))
        share = share / tl.sum(share, 0)
        high = tl.max(key, 0)
        key = tl.where(kept, key, low)
        # The lowest threshold above which every key has less than top_p of the shares above itself.
        if tl.sum(share, 0) >= top_p:
            between = 1
            while between > 0:
                middle = (low + high) >> 1
                if tl.sum(tl.where(key > middle, share, 0.0), 0) >= top_p:
                    low = middle
                else:
                    high = middle
                between = tl.sum(((key > low) & (key < high)).to(tl.int32), 0)
        kept = kept & (key > low)
    score = scaled + gumbel(seed_low, seed_high, frame, codebook, ids)
    return tl.argmax(tl.where(kept, score, -float("inf")), 0).to(tl.int32)
