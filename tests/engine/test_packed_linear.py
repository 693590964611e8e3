"""Packed matrices multiply as ``F.linear`` does: torch's operators for them are not public and may change."""

import pytest
import torch
import torch.nn.functional as F

from omni_ray.engine.packed_linear import PackedLinear


@pytest.mark.parametrize("rows", [(1,), (7,), (16,), (1, 130), (16, 1), (0,)])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float64, 0)])
def test_equals_linear(rows: tuple[int, ...], dtype: torch.dtype, error: float) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(90, 70, generator=generator).to(dtype).requires_grad_()
    x = torch.randn(*rows, 70, generator=generator).to(dtype)
    kept = weight.detach().clone()
    with torch.inference_mode():
        got, expected = PackedLinear(weight)(x), F.linear(x, weight)
    assert got.dtype == dtype
    assert got.shape == expected.shape
    torch.testing.assert_close(got, expected, rtol=error, atol=error * 10)
    assert torch.equal(weight, kept)


def test_rows_stay_apart() -> None:
    """A row of NaN makes no other row NaN."""
    x = torch.ones(5, 64)
    x[3] = torch.nan
    product = PackedLinear(torch.eye(64))(x)
    assert product.isnan().all(1).tolist() == [False, False, False, True, False]
