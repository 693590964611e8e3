"""What a cache of 8 bits keeps of numbers of every size."""

import pytest
import torch

from omni_ray.engine.kv_table import KVTable


def test_8_bits_keep_four_digits_of_any_size_and_touch_nothing_else() -> None:
    torch.manual_seed(0)
    table = KVTable.zeros((2, 3, 2, 8, 64), torch.zeros(1, dtype=torch.bfloat16), fp8=True)
    assert table.nbytes == 2 * 3 * 2 * 8 * (64 + 4)
    sizes = torch.tensor([1e-20, 1e-4, 1.0, 1e7])[None, None, :, None]
    new = (torch.randn(2, 2, 4, 64) * sizes).bfloat16()
    new[0, 0, 1] = 0
    rows, positions = torch.tensor([[0], [2]]), torch.tensor([[1, 2, 3, 5], [4, 5, 6, 7]])
    table.write(1, rows, positions, new)
    for row, (slot, where) in enumerate(zip((0, 2), positions, strict=True)):
        read = table.read(1, slice(slot, slot + 1), 8, torch.bfloat16)[0]
        assert read.dtype == torch.bfloat16
        largest = new[row].float().abs().amax(-1, keepdim=True)
        # Four significant bits; the smallest numbers of a head lose some beside its largest.
        error = (read[:, where].float() - new[row].float()).abs()
        assert (error <= new[row].float().abs() * 0.07 + largest * 3e-6).all()
        others = [position for position in range(8) if position not in where]
        assert not read[:, others].any()
    picked = table.read(1, torch.tensor([2]), 6, torch.float32)
    assert torch.equal(picked, table.read(1, slice(2, 3), 6, torch.float32))
    assert not table.read(0, slice(0, 3), 8, torch.float32).any()
    assert not table.read(1, slice(1, 2), 8, torch.float32).any()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_8_bits_hide_no_number_that_is_none(wrong: float) -> None:
    table = KVTable.zeros((1, 2, 1, 4, 32), torch.zeros(1), fp8=True)
    new = torch.ones(2, 1, 1, 32)
    new[1, 0, 0, 7] = wrong
    table.write(0, torch.tensor([[0], [1]]), torch.tensor([[2], [2]]), new)
    read = table.read(0, slice(0, 2), 4, torch.float32)
    assert read[0].isfinite().all()
    assert not read[1, 0, 2].isfinite().all()


def test_a_table_of_the_model_s_own_numbers_is_exact() -> None:
    table = KVTable.zeros((1, 1, 2, 4, 8), torch.zeros(1, dtype=torch.bfloat16), fp8=False)
    new = torch.randn(1, 2, 1, 8).bfloat16()
    table.write(0, torch.tensor([[0]]), torch.tensor([[3]]), new)
    assert torch.equal(table.read(0, slice(0, 1), 4, torch.bfloat16)[:, :, 3:], new)
    assert table.nbytes == 2 * 4 * 8 * 2
