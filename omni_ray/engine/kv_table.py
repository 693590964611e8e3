"""Keys and values of all slots of a decoder, in its own number format or in 8 bits.

8 bits are e4m3 (Micikevicius et al., "FP8 Formats for Deep Learning", 2022) with one float32 scale per layer, slot,
KV head and position: the largest number of a head's key or value becomes the format's largest. No calibration is
needed, and no number can be too large. Half the bytes of bfloat16, plus 3 % for the scales at 128 numbers per head.

A head's two halves are interleaved: numbers i and i + d / 2 lie beside each other. So a kernel that reads 16 bits at a
time, the least that matrix units can be fed with in every direction, has one number of either half in each.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

E4M3: Final = torch.float8_e4m3fn
E4M3_LARGEST: Final = 448.0
SMALLEST_SCALE: Final = 1e-30
"""Of heads that are all zeros."""


@dataclass(frozen=True, slots=True)
class KVTable:
    """One of keys or values, of all layers.

    Attributes:
        numbers: [layers, slots, groups, length, d]; e4m3 ones interleaved.
        scales: float32 [layers, slots, groups, length] if ``numbers`` are e4m3, else None.
    """

    numbers: Tensor
    scales: Tensor | None

    @classmethod
    def zeros(cls, shape: tuple[int, int, int, int, int], like: Tensor, fp8: bool) -> "KVTable":
        """On the device of ``like``, and of its dtype unless ``fp8``. Zeros that nobody touched take no memory."""
        numbers = torch.zeros(shape, dtype=E4M3 if fp8 else like.dtype, device=like.device)
        return cls(numbers, torch.zeros(shape[:-1], device=like.device) if fp8 else None)

    @property
    def nbytes(self) -> int:
        """Of numbers and scales."""
        return int(self.numbers.nbytes) + (0 if self.scales is None else int(self.scales.nbytes))

    def write(self, layer: int, rows: Tensor, positions: Tensor, new: Tensor) -> None:
        """Keep ``new`` [n, groups, t, d] at ``positions`` int64 [n, t] of the slots ``rows`` int64 [n, 1]."""
        new = new.transpose(1, 2)
        if self.scales is None:
            self.numbers[layer][rows, :, positions] = new
            return
        numbers, scales = _quantised(new)
        # As bytes: torch indexes those on every device.
        self.numbers[layer].view(torch.uint8)[rows, :, positions] = numbers.view(torch.uint8)
        self.scales[layer][rows, :, positions] = scales

    def read(self, layer: int, rows: slice | Tensor, reach: int, dtype: torch.dtype) -> Tensor:
        """The first ``reach`` positions of slots (int64 [n] or a slice): [n, groups, reach, d], e4m3 as ``dtype``."""
        if self.scales is None:
            return self.numbers[layer][rows, :, :reach]
        numbers = self.numbers[layer].view(torch.uint8)[rows, :, :reach].view(E4M3)
        halves = numbers.float().view(*numbers.shape[:-1], -1, 2).transpose(-1, -2).flatten(-2)
        return (halves * self.scales[layer][rows, :, :reach, None]).to(dtype)


def _quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` [..., d] as interleaved e4m3 [..., d] and float32 scales [...]; a number that is none spoils its scale."""
    pairs = x.float().reshape(*x.shape[:-1], 2, -1).transpose(-1, -2).flatten(-2)
    scales = pairs.abs().amax(-1).clamp_min(SMALLEST_SCALE) / E4M3_LARGEST
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    return (pairs / scales[..., None]).to(E4M3), scales
