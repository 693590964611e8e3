"""The noise of ``engine.noise`` in Triton: uniforms equal bit for bit, Gumbels round as in ``engine.torch_noise``."""

import triton
import triton.language as tl

from omni_ray.engine import noise

ROUNDS = tl.constexpr(noise.ROUNDS)
SHIFT = tl.constexpr(noise.UNIFORM_SHIFT)
SCALE = tl.constexpr(noise.UNIFORM_SCALE)


@triton.jit
def gumbel(seed_low, seed_high, position, codebook, ids):
    """Standard Gumbel float32 at vocabulary ``ids`` (int32, any shape); the others are int32 scalars.

    The two halves of the seed are words of the key. Logarithms are float64, so that they round as everywhere else.
    """
    zero = ids * 0
    word, _, _, _ = tl.philox_impl(
        ids.to(tl.uint32, bitcast=True),
        (zero + codebook).to(tl.uint32, bitcast=True),
        (zero + position).to(tl.uint32, bitcast=True),
        zero.to(tl.uint32, bitcast=True),
        (zero + seed_low).to(tl.uint32, bitcast=True),
        (zero + seed_high).to(tl.uint32, bitcast=True),
        ROUNDS,
    )
    uniform = ((word >> SHIFT).to(tl.float32) + 0.5) * SCALE
    return (-tl.log(-tl.log(uniform.to(tl.float64)))).to(tl.float32)
