"""Samples between model and format: checked, as 16-bit PCM, at another rate."""

import numpy as np
import soxr
from numpy.typing import NDArray

from omni_ray.errors import NonFiniteAudioError

FULL_SCALE = 32_767  # symmetric, so that -1.0 and 1.0 both fit and no sign flips


def check_finite(samples: NDArray[np.float32]) -> None:
    """Raises NonFiniteAudioError if any sample is NaN or infinite; clamped, they would be silence or a loud click."""
    bad = samples.size - int(np.count_nonzero(np.isfinite(samples)))
    if bad:
        raise NonFiniteAudioError(f"the model produced {bad} NaN or infinite samples of {samples.size}")


def pcm16(samples: NDArray[np.float32]) -> tuple[bytes, int]:
    """Converts to 16-bit PCM; exact for every int16 value v in [-32767, 32767] given as v / 32767.

    Args:
        samples: float32 [n] or [n, channels].

    Returns:
        Little-endian interleaved int16, and how many samples lay outside [-1, 1] and were clipped.

    Raises:
        NonFiniteAudioError: before anything is clamped.
    """
    check_finite(samples)
    clipped = int(np.count_nonzero(np.abs(samples) > 1.0))
    return np.rint(np.clip(samples, -1.0, 1.0) * FULL_SCALE).astype("<i2").tobytes(), clipped


class StreamResampler:
    """Resamples one stream chunk by chunk; the concatenated result does not depend on the chunking.

    Args:
        in_rate: Hz of the samples pushed.
        out_rate: Hz of the samples returned; equal rates pass samples through.
        channels: 1 takes and returns [n], or [n, 1]; more take and return [n, channels].
    """

    def __init__(self, in_rate: int, out_rate: int, channels: int) -> None:
        self._stream = None
        if in_rate != out_rate:
            self._stream = soxr.ResampleStream(in_rate, out_rate, channels, dtype="float32", quality="HQ")

    def push(self, samples: NDArray[np.float32], last: bool = False) -> NDArray[np.float32]:
        """Returns what is ready; the filter holds a tail back until ``last``, after which nothing may be pushed."""
        if self._stream is None:
            return samples
        resampled: NDArray[np.float32] = self._stream.resample_chunk(np.asarray(samples, np.float32), last=last)
        return resampled
