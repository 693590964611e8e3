"""Shapes in which torch on a CPU gives a row the same bits wherever it stands: for ``deterministic: true``.

Fixed shapes alone are not enough. Measured with torch 2.13 (MKL, AVX-512), 1 to 4 threads: equal rows of one call came
out unequal in these cases and in no other. Other machines may differ, so ``ar_selftest`` looks each time.

- Matrix products of 3, 5, 6, 7 or 17 rows: the odd ones go through another kernel. Multiples of ``ROWS`` did not.
- Attention whose scratch rows a second thread gets at another alignment: 3 queries per head, or 257 positions.
  ``QUERIES`` and ``POSITIONS`` are the multiples that keep them alike.
- The last elements of an elementwise function, up to two vectors of them: they are computed one by one. Where a row has
  fewer than ``ELEMENTS`` elements, or no multiple of them, that many rows keep all rows out of it.
"""

from typing import Final

import torch.nn.functional as F
from torch import Tensor

ROWS: Final = 8
QUERIES: Final = 4
POSITIONS: Final = 64
ELEMENTS: Final = 32


def rounded_up(number: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``number``."""
    return -(-number // multiple) * multiple


def attend_alike(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None = None) -> Tensor:
    """``scaled_dot_product_attention`` with the queries padded to a multiple of ``QUERIES``.

    Args:
        q: [n, heads, queries, d].
        k: [n, heads, positions, d].
        v: [n, heads, positions, d].
        mask: additive, [n, 1, queries, positions] or one that broadcasts to it over rows and heads; None for none.
        scale: of the scores; None is ``d ** -0.5``.

    Returns:
        [n, heads, queries, d].
    """
    queries = q.shape[2]
    missing = rounded_up(queries, QUERIES) - queries
    if missing:
        q = F.pad(q, (0, 0, 0, missing))
        mask = None if mask is None else F.pad(mask, (0, 0, 0, missing))
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    return y[:, :, :queries] if missing else y
