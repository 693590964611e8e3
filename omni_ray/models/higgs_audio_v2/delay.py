"""The delay pattern: in row r stands the code of codebook k for frame r - k. numpy only.

Copet et al. 2023, "Simple and Controllable Music Generation", section 2.2. As upstream's ``HiggsAudioV2Processor``.
"""

import numpy as np
from numpy.typing import NDArray

Codes = NDArray[np.int64]


def delayed(frames: Codes, begin: int, end: int) -> Codes:
    """The rows of a whole sound, as ``HiggsAudioV2Processor.build_delay_pattern`` makes them of a recording.

    Args:
        frames: int64 [n, codebooks].
        begin: the id that stands where a codebook has no code yet, and before its first one.
        end: the id that stands behind a codebook's last code.

    Returns:
        int64 [n + codebooks + 1, codebooks].
    """
    n, codebooks = frames.shape
    rows = np.full((n + codebooks + 1, codebooks), end, np.int64)
    for k in range(codebooks):
        rows[: k + 1, k] = begin
        rows[k + 1 : k + 1 + n, k] = frames[:, k]
    return rows


class Realigned:
    """Takes the delay out of rows as they come: a frame is known ``codebooks - 1`` rows after its first code."""

    def __init__(self) -> None:
        self._waiting: Codes | None = None

    def push(self, rows: Codes) -> Codes:
        """The frames that the next rows [n, codebooks] complete, int64 [m, codebooks]; m may be 0."""
        known = rows if self._waiting is None else np.concatenate((self._waiting, rows))
        codebooks = rows.shape[1]
        complete = max(0, len(known) - codebooks + 1)
        self._waiting = known[complete:]
        return np.stack([known[k : k + complete, k] for k in range(codebooks)], 1)
