"""Counter-based noise in numpy: every value is a pure function of (seed, position, codebook, vocabulary id).

The generator is Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011), the
one that Triton ships as ``tl.philox``. There is no state to carry: a replayed or moved request draws the same values.

How the four coordinates become the cipher's input, for every implementation of this noise:

    key     = (seed low 32 bits, seed high 32 bits)
    counter = (vocabulary id, codebook, position low 32 bits, position high 32 bits)

The integers are equal everywhere. Uniforms are too: they take 23 bits, so each one is an exact float32. Normals and
Gumbels go through ``log`` and ``cos``, whose last bit belongs to the library that computes them.
"""

from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

ROUNDS: Final = 10
MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
"""The round function's multipliers, of counter words 0 and 2."""
KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
"""What the key words grow by after each round: the golden ratio and sqrt(3) - 1, as 32-bit fractions."""
WORD_MASK: Final = 0xFFFFFFFF
SEED_MASK: Final = 0xFFFFFFFFFFFFFFFF
UNIFORM_SHIFT: Final = 9
"""Bits of a word that a uniform drops; the 23 left and the added half fit a float32 exactly."""
UNIFORM_SCALE: Final = 2.0**-23

Coordinate: TypeAlias = int | NDArray[np.integer]
"""An int or an integer array; arrays broadcast against each other."""
Words: TypeAlias = tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint32]]

GUMBEL_SPAN: Final = 19.5
"""More than two Gumbels of this noise ever differ: uniforms are at least 2**-24 away from 0 and 1."""

_SHIFT: Final = np.uint64(32)
_MASK: Final = np.uint64(WORD_MASK)


def philox4x32(counter: tuple[Coordinate, ...], key: tuple[Coordinate, Coordinate]) -> Words:
    """The block cipher itself.

    Args:
        counter: four words, ints or arrays of one broadcast shape; only their low 32 bits count.
        key: two words, as the counter's.

    Returns:
        Four uint32 arrays of the broadcast shape.
    """
    c0, c1, c2, c3 = np.broadcast_arrays(*(_words(word) for word in counter))
    k0, k1 = (_words(word) for word in key)
    m0, m1 = (np.uint64(m) for m in MULTIPLIERS)
    step0, step1 = (np.uint64(step) for step in KEY_STEPS)
    for _ in range(ROUNDS):
        product0, product1 = m0 * c0, m1 * c2  # 32 x 32 bits: exact in 64
        c0 = (product1 >> _SHIFT) ^ c1 ^ k0
        c2 = (product0 >> _SHIFT) ^ c3 ^ k1
        c1, c3 = product1 & _MASK, product0 & _MASK
        k0, k1 = (k0 + step0) & _MASK, (k1 + step1) & _MASK
    return c0.astype(np.uint32), c1.astype(np.uint32), c2.astype(np.uint32), c3.astype(np.uint32)


def philox(seed: Coordinate, position: Coordinate, codebook: Coordinate, vocabulary_id: Coordinate) -> Words:
    """128 random bits per coordinate, as four uint32 arrays of the coordinates' broadcast shape.

    Args:
        seed: the request's seed, taken modulo 2**64; an array for draws of several requests.
        position: token, frame or row index; 64 bits count.
        codebook: which of a position's draws; 32 bits count.
        vocabulary_id: token id, spectrum bin or any other index inside the draw; 32 bits count.
    """
    wide, key = _wide(position), _wide(seed)
    return philox4x32((vocabulary_id, codebook, wide, wide >> _SHIFT), (key, key >> _SHIFT))


def uniform(
    seed: Coordinate, position: Coordinate, codebook: Coordinate, vocabulary_id: Coordinate
) -> NDArray[np.float32]:
    """Uniform float32 strictly between 0 and 1, from the first word: odd multiples of 2**-24."""
    return _unit(philox(seed, position, codebook, vocabulary_id)[0])


def gumbel(
    seed: Coordinate, position: Coordinate, codebook: Coordinate, vocabulary_id: Coordinate
) -> NDArray[np.float32]:
    """Standard Gumbel float32: the argmax of logits plus this is a sample of their softmax."""
    return np.asarray(-np.log(-np.log(uniform(seed, position, codebook, vocabulary_id))), np.float32)


def normal(
    seed: Coordinate, position: Coordinate, codebook: Coordinate, vocabulary_id: Coordinate
) -> NDArray[np.float32]:
    """Standard normal float32 (Box and Muller 1958) from the first two words; never beyond 5.8."""
    radius, angle = _polar(philox(seed, position, codebook, vocabulary_id))
    return np.asarray(radius * np.cos(angle), np.float32)


def complex_normal(
    seed: Coordinate, position: Coordinate, codebook: Coordinate, vocabulary_id: Coordinate
) -> NDArray[np.complex64]:
    """Complex64 whose real and imaginary parts are independent standard normals.

    Box-Muller makes its normals in pairs; the real part is what ``normal`` gives, the imaginary part its partner, so
    this costs half of two ``normal`` calls.
    """
    radius, angle = _polar(philox(seed, position, codebook, vocabulary_id))
    out = np.empty(radius.shape, np.complex64)
    np.multiply(radius, np.cos(angle), out=out.real)
    np.multiply(radius, np.sin(angle), out=out.imag)
    return out


def _polar(words: Words) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    radius = np.sqrt(np.float32(-2) * np.log(_unit(words[0])))
    return np.asarray(radius), np.asarray(np.float32(2 * np.pi) * _unit(words[1]))


def _unit(word: NDArray[np.uint32]) -> NDArray[np.float32]:
    kept = (word >> np.uint32(UNIFORM_SHIFT)).astype(np.float32)
    return np.asarray((kept + np.float32(0.5)) * np.float32(UNIFORM_SCALE))


def _wide(value: Coordinate) -> NDArray[np.uint64]:
    """``value`` modulo 2**64."""
    if isinstance(value, int):
        return np.asarray(value & SEED_MASK, np.uint64)
    return value.astype(np.uint64)


def _words(value: Coordinate) -> NDArray[np.uint64]:
    """``value`` modulo 2**32, in 64 bits so that products are exact."""
    return np.asarray(_wide(value) & _MASK)
