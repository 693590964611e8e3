"""The attention kernel over slots against plain torch; also on a CPU with ``TRITON_INTERPRET=1``."""

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from omni_ray.engine.kv_table import KVTable

LAYERS, SLOTS, HEADS, GROUPS, LENGTH, DIM = 2, 5, 4, 2, 192, 32
EPS, SCALE = 1e-6, DIM**-0.5
ROWS = ((2, 0), (-1, 0), (0, 5), (4, 64), (1, 131))
"""(slot, position): nobody's row, an empty cache, one block of positions and several."""


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """``x`` [groups, d] float32, ``cos`` and ``sin`` [d / 2]."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_see_their_slots_and_nothing_else(device: str, dtype: torch.dtype, fp8: bool, splits: int) -> None:
    from omni_ray.engine.kernels.attention import HeadNorms
    from omni_ray.engine.kernels.rows import nobody
    from omni_ray.engine.kernels.slot_attention import Partials, attend_slots

    torch.manual_seed(0)
    m = len(ROWS)
    qkv = torch.randn(m, (HEADS + 2 * GROUPS) * DIM, device=device).to(dtype)
    gains = [1 + torch.rand(DIM, device=device).to(dtype) for _ in range(2)]
    angles = torch.randn(m, DIM // 2, device=device)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    tables = [KVTable.zeros((LAYERS, SLOTS, GROUPS, LENGTH, DIM), qkv, fp8) for _ in range(2)]
    everywhere = torch.arange(SLOTS, device=device)[:, None], torch.arange(LENGTH, device=device).expand(SLOTS, -1)
    for table in tables:
        for layer in range(LAYERS):
            past = 3 * torch.randn(SLOTS, GROUPS, LENGTH, DIM, device=device)
            table.write(layer, *everywhere, (past * torch.rand(SLOTS, GROUPS, LENGTH, 1, device=device)).to(dtype))
    rows = nobody(m)
    rows[:, [0, 3]] = ROWS
    before = [KVTable(t.numbers.clone(), None if t.scales is None else t.scales.clone()) for t in tables]

    out = torch.empty(m, HEADS * DIM, device=device, dtype=dtype)
    partials = Partials.empty(m, HEADS, splits, DIM, torch.device(device))
    told = torch.from_numpy(np.ascontiguousarray(rows)).to(device)
    attend_slots(qkv, told, HeadNorms(*gains, EPS), (cos, sin), *tables, 1, partials, out, SCALE)

    near = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    for row, (slot, position) in enumerate(ROWS):
        if slot < 0:
            continue
        q, k, v = qkv[row].float().view(-1, DIM).split((HEADS, GROUPS, GROUPS))
        q, k = (
            rotated(rms_norm(x, (DIM,), gain.float(), EPS), cos[row].float(), sin[row].float()).to(dtype)
            for x, gain in zip((q, k), gains, strict=True)
        )
        seen = []
        for table, old, new in zip(tables, before, (k, v), strict=True):
            where = torch.tensor([[slot]], device=device), torch.tensor([[position]], device=device)
            old.write(1, *where, new.to(dtype)[None, :, None])
            seen.append(table.read(1, slice(slot, slot + 1), position + 1, torch.float32).float())
        grouped = q.double().view(1, GROUPS, HEADS // GROUPS, DIM)
        expected = scaled_dot_product_attention(grouped, *(x.double() for x in seen), scale=SCALE)
        torch.testing.assert_close(out[row].double(), expected.flatten(), **near)
    for table, plain in zip(tables, before, strict=True):
        # Numbers of e4m3 are an eighth apart. Few lie on the border between two.
        ours, theirs = (t.read(1, slice(0, SLOTS), LENGTH, torch.float32).float() for t in (table, plain))
        torch.testing.assert_close(ours, theirs, rtol=0.13 if fp8 else 8e-3, atol=1e-2)
        # Sums in another order change the last bits of float32, and what lies on such a border.
        assert ((ours - theirs).abs() > 1e-5 + 1e-5 * theirs.abs()).float().mean() < 1e-3
        assert torch.equal(table.numbers[0].float(), plain.numbers[0].float())  # the other layer
