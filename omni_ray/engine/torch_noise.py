"""The noise of ``noise`` in torch: the same function of (seed, position, codebook, vocabulary id), for rows of a batch.

Every row has a seed and a position of its own. The cipher's words and the uniforms equal ``noise``'s bit for bit; see
there for the generator and for how coordinates become its input. All integers are int64 tensors that hold 32-bit
words, because torch multiplies no unsigned ones.
"""

from typing import Final

import torch
from torch import Tensor

from omni_ray.engine.noise import KEY_STEPS, MULTIPLIERS, ROUNDS, UNIFORM_SCALE, UNIFORM_SHIFT, WORD_MASK

_HALF: Final = 0xFFFF


def philox(seeds: Tensor, positions: Tensor, codebook: int, vocabulary_ids: Tensor) -> tuple[Tensor, ...]:
    """128 random bits per coordinate.

    Args:
        seeds: int64 [n], seeds modulo 2**64 as two's complement (``signed``).
        positions: int64 [n].
        codebook: which of a position's draws.
        vocabulary_ids: int64 [n, m] or [m].

    Returns:
        Four int64 tensors [n, m] of values below 2**32.
    """
    shape = (len(seeds), vocabulary_ids.shape[-1])
    c0 = (vocabulary_ids & WORD_MASK).expand(shape)
    c1 = torch.full_like(c0, codebook & WORD_MASK)
    c2 = (positions & WORD_MASK)[:, None].expand(shape)
    c3 = (positions >> 32 & WORD_MASK)[:, None].expand(shape)
    k0, k1 = (seeds & WORD_MASK)[:, None], (seeds >> 32 & WORD_MASK)[:, None]
    for _ in range(ROUNDS):
        high0, low0 = _product(c0, MULTIPLIERS[0])
        high1, low1 = _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + KEY_STEPS[0] & WORD_MASK, k1 + KEY_STEPS[1] & WORD_MASK
    return c0, c1, c2, c3


def uniform(seeds: Tensor, positions: Tensor, codebook: int, vocabulary_ids: Tensor) -> Tensor:
    """Uniform float32 [n, m] strictly between 0 and 1; arguments as ``philox``."""
    word = philox(seeds, positions, codebook, vocabulary_ids)[0]
    return ((word >> UNIFORM_SHIFT).float() + 0.5) * UNIFORM_SCALE


def gumbel(seeds: Tensor, positions: Tensor, codebook: int, vocabulary_ids: Tensor) -> Tensor:
    """Standard Gumbel float32 [n, m]; arguments as ``philox``.

    The logarithms are taken in float64 and rounded: torch computes the last elements of a tensor by another routine
    than the others, whose last bit may differ, and a row's noise must not depend on its place in the batch.
    """
    u = uniform(seeds, positions, codebook, vocabulary_ids).double()
    return (-torch.log(-torch.log(u))).float()


def signed(seed: int) -> int:
    """``seed`` modulo 2**64 as int64 holds it."""
    wrapped = seed & 0xFFFFFFFFFFFFFFFF
    return wrapped - (1 << 64) if wrapped >> 63 else wrapped


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a 32 x 32 bit product, by 16-bit halves of the multiplier: nothing exceeds int64."""
    upper, lower = word * (multiplier >> 16), word * (multiplier & _HALF)
    high = upper + (lower >> 16) >> 16
    low = ((upper & _HALF) << 16) + lower & WORD_MASK
    return high, low
