"""A matrix laid out once as this CPU multiplies it fastest; elsewhere an ordinary one. Knows no model.

``F.linear`` on a CPU hands oneDNN the weight as it lies in memory, and every call pays for that. Packed matrices of a
small Llama's shapes took (torch 2.13, AVX-512, one thread): in bfloat16 at one row 0.4 to 0.75 of ``F.linear``'s time,
at 16 rows 0.6 to 0.75, at 128 rows 0.9; in float32 at one row 1.05 to 1.1, at 16 rows 0.65, at 128 rows 0.8.

The operators are those that torch's own compiler emits for a frozen linear layer. They are not public, so
``tests/engine/test_packed_linear.py`` compares them with ``F.linear``.
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS_HINT: Final = 16
"""Rows that the layout is chosen for; any number may be multiplied."""


class PackedLinear:
    """``F.linear`` without bias by a matrix that never changes.

    The packed matrix is a copy: it takes the original's memory once more where the original lives on.
    """

    def __init__(self, weight: Tensor) -> None:
        """Pack ``weight`` [out, in] if it is float32 or bfloat16 on a CPU for which oneDNN has packed kernels."""
        self._packed = _packs(weight)
        weight = weight.detach()
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, ROWS_HINT) if self._packed else weight

    def __call__(self, x: Tensor) -> Tensor:
        """``x`` [..., in] times the matrix: [..., out], in its dtype."""
        if self._packed:
            product: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
            return product
        return F.linear(x, self._weight)


def _packs(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
