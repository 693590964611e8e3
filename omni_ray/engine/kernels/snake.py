"""SnakeBeta with what stands around it in one pass: ``x + sin(x e^alpha)^2 / (e^beta + 1e-9)``, per channel.

transformers computes it in seven passes over the whole activation, and adds biases and residuals in further ones; at
the codec's rates these passes take more time than its convolutions.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def snake(x: Tensor, alpha: Tensor, beta: Tensor, bias: Tensor | None = None, room: int = 0) -> Tensor:
    """SnakeBeta of ``x + bias``, behind ``room`` positions that are left undefined.

    Args:
        x: [B, C, T].
        alpha: [C], as upstream's parameter: the logarithm.
        beta: [C], likewise.
        bias: [C], of the convolution before.
        room: for the past of the convolution after it.

    Returns:
        [B, C, room + T]; float32 inside.
    """
    x = x.contiguous()
    rows, channels, times = x.shape
    out = torch.empty(rows, channels, room + times, dtype=x.dtype, device=x.device)
    grid = (rows * channels, triton.cdiv(times, BLOCK))
    _snake[grid](
        x, alpha, beta, x if bias is None else bias, out, channels, times, room,
        BIAS=bias is not None, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def add_(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """``x += bias + residual`` [B, C, T], all contiguous; ``bias`` [C]."""
    rows, channels, times = x.shape
    assert x.is_contiguous()
    assert residual.is_contiguous()
    _add[(rows * channels, triton.cdiv(times, BLOCK))](x, bias, residual, channels, times, BLOCK=BLOCK, num_warps=4)
    return x


@triton.jit
def _snake(x, alpha, beta, bias, out, C, T, room, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    a = tl.exp(tl.load(alpha + row % C).to(tl.float32))
    b = tl.exp(tl.load(beta + row % C).to(tl.float32))
    v = tl.load(x + row.to(tl.int64) * T + t, mask=t < T, other=0.0).to(tl.float32)
    if BIAS:
        v += tl.load(bias + row % C).to(tl.float32)
    s = tl.sin(v * a)
    y = v + s * s / (b + 1e-9)
    tl.store(out + row.to(tl.int64) * (room + T) + room + t, y.to(out.dtype.element_ty), mask=t < T)


@triton.jit
def _add(x, bias, residual, C, T, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    t = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = row.to(tl.int64) * T + t
    y = tl.load(x + at, mask=t < T, other=0.0).to(tl.float32) + tl.load(bias + row % C).to(tl.float32)
    y += tl.load(residual + at, mask=t < T, other=0.0).to(tl.float32)
    tl.store(x + at, y.to(x.dtype.element_ty), mask=t < T)
