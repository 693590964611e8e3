"""Dense products against plain torch, and the sums of squares that they leave and are given.

Also on a CPU with ``TRITON_INTERPRET=1``.
"""

import pytest
import torch
from torch.nn.functional import silu


@pytest.mark.parametrize(
    ("dtype", "fetched"), [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)]
)
@pytest.mark.parametrize("rows", [2, 3, 70])
def test_a_norm_takes_the_squares_that_the_product_before_left(
    device: str, dtype: torch.dtype, rows: int, fetched: bool
) -> None:
    from omni_ray.engine.kernels.linear import FEW, Tiles, linear, parts_of

    tiles = Tiles(64, 16, 64, 4, 3, fetched=True) if fetched and rows > FEW else None
    torch.manual_seed(0)
    inputs, hidden, width = 64, 128, 40
    first = torch.randn(rows, inputs, device=device).to(dtype)
    down = (torch.randn(hidden, inputs, device=device) / 8).to(dtype)
    up = (torch.randn(2 * width, hidden, device=device) / 11).to(dtype)
    x = (4 * torch.randn(rows, hidden, device=device)).to(dtype)
    before = x.double()
    squares = torch.full((rows, parts_of(rows, hidden)), float("nan"), device=device)
    out = torch.empty(rows, width, device=device, dtype=dtype)
    linear(first, down, x, residual=x, tiles=tiles, squares_left=squares)
    linear(x, up, out, eps=1e-6, gated=True, tiles=tiles, squares=squares)

    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    torch.testing.assert_close(x.double(), before + first.double() @ down.double().T, **near)
    wide = x.double()
    normed = wide * torch.rsqrt(wide.square().mean(1, keepdim=True) + 1e-6)
    gate, rest = (normed @ up.double().T).chunk(2, 1)
    torch.testing.assert_close(out.double(), silu(gate) * rest, **near)
    if rows > FEW:
        torch.testing.assert_close(squares.double().sum(1), wide.square().sum(1), rtol=1e-5, atol=1e-5)
        linear(x, up, out, eps=1e-6, gated=True, tiles=tiles, squares=4 * squares)  # they are what is read
        torch.testing.assert_close(out.double(), silu(gate / 2) * rest / 2, **near)
