"""A codec engine asked for one stream of code frames, and what its sound must be."""

from collections.abc import AsyncIterator
from contextlib import aclosing

import numpy as np
from numpy.typing import NDArray

from omni_ray.engine.codec import CodecEngine
from omni_ray.engine.types import AudioChunk, CodeFrameChunk, Finish, Request

Codes = NDArray[np.int64]
Sound = NDArray[np.float32]


def frames(count: int, seed: int = 0) -> Codes:
    """Random frames of the tiny checkpoints: 8 codebooks of 32 codes."""
    return np.random.default_rng(seed).integers(32, size=(count, 8))


async def sound(made: CodecEngine, codes: Codes, at_once: int = 1) -> Sound:
    """All samples of one request, whose frames come ``at_once`` at a time."""

    async def inputs() -> AsyncIterator[CodeFrameChunk]:
        for start in range(0, len(codes), at_once):
            yield CodeFrameChunk(start, codes[start : start + at_once])

    async with aclosing(made.generate(Request("r", seed=0), {"talker": inputs()})) as outputs:
        *chunks, last = [output async for output in outputs]
    assert isinstance(last, Finish)
    assert all(isinstance(c, AudioChunk) and c.sample_rate == 24_000 for c in chunks)
    return np.concatenate([c.samples for c in chunks])


def assert_equal_sound(stream: Sound, whole: Sound) -> None:
    """Within 1e-5 of the peak, and not silent."""
    assert stream.shape == whole.shape
    assert np.sqrt((whole**2).mean()) > 0.01
    assert np.abs(stream - whole).max() <= 1e-5 * np.abs(whole).max()
