"""How kernels follow each other: with programmatic dependent launch, one starts while the one before it ends.

Every kernel takes ``PDL``. With it, a kernel may read weights at once, then waits (``griddepcontrol.wait``) for all the
kernels before it, and only then touches what they wrote; its own successor may start from then on. This holds in a
captured graph too.
"""

from typing import Any, Final

import triton
import triton.language as tl
from torch import Tensor

EARLY_ROWS: Final = 16
"""With more rows a kernel fills the GPU, and an early successor would only be in its way."""

overlap = True
"""Benchmarks switch it off, to see what it brings."""


def following(x: Tensor) -> dict[str, Any]:
    """Launch options of a kernel that works on the rows of ``x``."""
    if not (x.is_cuda and overlap):
        return {"PDL": 0}
    return {"PDL": 2 if len(x) <= EARLY_ROWS else 1, "launch_pdl": True}


@triton.jit
def turn(PDL: tl.constexpr):
    """Wait for the kernels before; with 2, let the next one start at once, else when this one ends."""
    if PDL > 0:
        tl.extra.cuda.gdc_wait()
    if PDL > 1:
        tl.extra.cuda.gdc_launch_dependents()
