"""What a captured frame is told about each of its rows: sixteen 32-bit words, in one small table per frame.

Everything that differs from row to row and frame to frame is in it, so a graph is captured once per number of rows, and
a frame costs one copy to the GPU. A row of nobody has slot -1: it is computed and writes nothing.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

ROW_WORDS: Final = 16
"""Words: slot, text token, frame number, position in the cache, rope position (float32), seed (low and high half),
temperature (float32), top_k, top_p (float32), repetition penalty (float32); the rest is unused."""

RESULT_EXTRA: Final = 2
"""Words behind a row's codes: whether it said the stop code, whether its numbers were finite."""


def nobody(rows: int) -> NDArray[np.int32]:
    """A table [rows, ROW_WORDS] of rows of nobody; they draw greedily."""
    table = np.zeros((rows, ROW_WORDS), np.int32)
    table[:, 0] = -1
    return table
