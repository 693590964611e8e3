"""Codecs that carry each request's past, with a toy decoder that can not go back: its slots change in place."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import numpy as np
from numpy.typing import NDArray

from omni_ray.config.pipeline import Edge, StageExecutionType, StagePipelineConfig
from omni_ray.engine.base import EngineContext
from omni_ray.engine.codec import CodecEngine, Samples
from omni_ray.engine.frame_codec import Codes, FrameCodec, FrameDecoder
from omni_ray.engine.options import FrameCodecOptions
from omni_ray.engine.types import AudioChunk, CodeFrameChunk, Request

BROKEN, SLOTS = 99, 8


class SlotDecoder(FrameDecoder):
    """A sample per frame: the sum of all codes so far, in the request's slot. A step fails at the code ``BROKEN``."""

    def __init__(self) -> None:
        self.sums = np.zeros(SLOTS)
        self.free = list(range(SLOTS))
        self.steps: list[int] = []

    def step(self, pasts: Sequence[int | None], codes: Sequence[Codes]) -> list[tuple[Samples, int]]:
        assert len(codes) <= self.rows(max(map(len, codes)))
        self.steps.append(len(codes))
        if any((given == BROKEN).any() for given in codes):
            raise ValueError("a broken step")
        done = []
        for past, given in zip(pasts, codes, strict=True):
            slot = past
            if slot is None:
                slot = self.free.pop()
                self.sums[slot] = 0
            heard = self.sums[slot] + np.cumsum(given.sum(1))
            self.sums[slot] = heard[-1]
            done.append((heard.astype(np.float32), slot))
        return done

    def rows(self, frames: int) -> int:
        return 16 // frames

    def release(self, past: int) -> None:
        self.free.append(past)


class Toy(FrameCodec):
    sample_rate = 1000

    def load(self) -> None:
        self.use(SlotDecoder(), codebooks=2, codebook_size=100)


async def sound(engine: CodecEngine, codes: Codes, ready: asyncio.Barrier) -> NDArray[np.float32]:
    """All samples of one stream of frames, whose first chunk is asked for together with the others'."""

    async def inputs() -> AsyncIterator[CodeFrameChunk]:
        await ready.wait()
        yield CodeFrameChunk(0, codes)

    async with aclosing(engine.generate(Request("r", seed=0), {"talker": inputs()})) as outputs:
        return np.concatenate([o.samples async for o in outputs if isinstance(o, AudioChunk)])


async def test_streams_decoded_before_a_later_step_fails_keep_their_sound() -> None:
    """Of each stream's second chunk: two long rows at a time, then the short ones, of which one is broken."""
    stage = StagePipelineConfig(
        name="code2wav",
        execution_type=StageExecutionType.LLM_GENERATION,
        model_arch="Toy",
        inputs=(Edge(source="request", processor="x:y", parts=("speech_text",)),),
    )
    engine = CodecEngine(EngineContext(stage, None, Toy, FrameCodecOptions(chunk_frames=(8,))))
    await engine.start()
    decoder = engine._codec._decoder  # type: ignore[attr-defined]
    decoder.steps.clear()
    random = np.random.default_rng(0)
    streams = [random.integers(1, 50, (length, 2)) for length in (28, 28, 28, 11, 10)]
    streams[3][9, 0] = BROKEN
    ready = asyncio.Barrier(len(streams))
    made = await asyncio.gather(*(sound(engine, codes, ready) for codes in streams), return_exceptions=True)
    assert decoder.steps[:6] == [2, 2, 1, 2, 1, 2], "the broken step is not the last of three"
    for codes, samples in zip(streams, made, strict=True):
        if (codes == BROKEN).any():
            assert isinstance(samples, ValueError)
            continue
        assert isinstance(samples, np.ndarray)
        np.testing.assert_array_equal(samples, np.cumsum(codes.sum(1)))
    await engine._batches.run(lambda: None)  # whatever is to be closed is closed before this
    assert sorted(decoder.free) == list(range(SLOTS))
    await engine.stop()
