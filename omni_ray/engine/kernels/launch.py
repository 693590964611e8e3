"""How kernels follow each other: with programmatic dependent launch, one starts while the one before it ends.

Every kernel takes ``PDL``. With it, a kernel may read weights at once, then waits (``griddepcontrol.wait``) for all the
kernels before it, and only then touches what they wrote; its own successor may start from then on. This holds in a
captured graph too.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

overlap = True
"""Benchmarks switch it off, to see what it brings."""


def following(x: Tensor) -> dict[str, Any]:
    """Launch options of a kernel that works on ``x``."""
    return {"PDL": True, "launch_pdl": True} if x.is_cuda and overlap else {"PDL": False}


@triton.jit
def turn(PDL: tl.constexpr):
    """Wait for the kernels before, then let the next one start."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
