"""How a captured frame begins: each row's input and its rotary tables."""

import triton
import triton.language as tl
from torch import Tensor

from omni_ray.engine.kernels.launch import following, turn
from omni_ray.engine.kernels.rows import ROW_WORDS


def begin_frame(
    rows: Tensor,
    last: Tensor,
    text: Tensor,
    frequencies: Tensor,
    x: Tensor,
    rotary: tuple[Tensor, Tensor],
    counts: Tensor,
) -> None:
    """``x = last[slot] + text[token]``, cosines and sines of the row's rope position, and counters set to zero.

    Args:
        rows: int32 [M, ROW_WORDS].
        last: [slots, H].
        text: [tokens, H].
        frequencies: float32 [d / 2].
        x: [M, H].
        rotary: [M, d / 2] each.
        counts: int32, any number of them.
    """
    m, hidden = x.shape
    half = len(frequencies)
    _begin[(m,)](
        rows, last, text, frequencies, x, *rotary, counts,
        COUNTS=counts.numel(), STRIDE=1024 * m, WORDS=ROW_WORDS, H=hidden, HALF=half,
        BLOCK_H=triton.next_power_of_2(hidden),
        BLOCK_D=triton.next_power_of_2(half), num_warps=4, **following(x),
    )  # fmt: skip


@triton.jit
def _begin(
    rows, last, text, frequencies, x, cosines, sines, counts,
    COUNTS: tl.constexpr, STRIDE: tl.constexpr, WORDS: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    turn(PDL)
    for start in range(m * 1024, COUNTS, STRIDE):
        at = start + tl.arange(0, 1024)
        tl.store(counts + at, 0, mask=at < COUNTS)
    slot, token = tl.load(rows + m * WORDS), tl.load(rows + m * WORDS + 1)
    h, d = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_D)
    wide = h < H
    frame = tl.load(last + tl.maximum(slot, 0).to(tl.int64) * H + h, mask=wide, other=0.0).to(tl.float32)
    word = tl.load(text + token.to(tl.int64) * H + h, mask=wide, other=0.0).to(tl.float32)
    tl.store(x + m * H + h, (frame + word).to(x.dtype.element_ty), mask=wide)
    position = tl.load(rows + m * WORDS + 4).to(tl.float32, bitcast=True)
    angle = position * tl.load(frequencies + d, mask=d < HALF, other=0.0)
    tl.store(cosines + m * HALF + d, tl.cos(angle).to(cosines.dtype.element_ty), mask=d < HALF)
    tl.store(sines + m * HALF + d, tl.sin(angle).to(sines.dtype.element_ty), mask=d < HALF)
