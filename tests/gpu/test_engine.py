"""The engine over captured frames: read one frame late, and nobody notices."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from talkers import OTHERS, context, prompt

from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.ar import AREngine
from omni_ray.engine.ar_model import FrameStep
from omni_ray.engine.types import CodeFrameChunk, Finish, Request
from omni_ray.models.qwen3_omni.talker_input import TalkerText

FRAMES = 14
ROWS = 6


async def source(number: int, pause: float) -> AsyncIterator[Any]:
    yield prompt(10 + 23 * number)
    for token in range(2000, 2010):
        await asyncio.sleep(pause)
        yield TalkerText((token + number,))


async def speak(engine: AREngine, number: int, pause: float = 0.0, stop_after: int = 1000) -> np.ndarray:
    sampling = SamplingParams(max_tokens=FRAMES).over(OTHERS[number % len(OTHERS)])
    request = Request(str(number), number, sampling=sampling)
    frames: list[np.ndarray] = []
    async with aclosing(engine.generate(request, {"thinker": source(number, pause)})) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            if isinstance(output, Finish):
                assert output.usage.audio_tokens == len(frames)
                break
            assert isinstance(output, CodeFrameChunk)
            assert output.position == len(frames)
            frames.extend(output.frames)
            if len(frames) == stop_after:
                break
    return np.stack(frames)


@pytest.fixture
def run(published: Path) -> Callable[[Callable[[AREngine], Any]], Any]:
    def with_engine(work: Callable[[AREngine], Any]) -> Any:
        async def main() -> Any:
            engine = AREngine(context(published, "float32", ROWS))
            await engine.start()
            try:
                return await work(engine)
            finally:
                assert engine.stats().running == engine.stats().queued == 0
                await engine.stop()

        return asyncio.run(main())

    return with_engine


def test_frames_are_the_same_alone_and_in_a_crowd_that_comes_and_goes(run: Any) -> None:
    async def work(engine: AREngine) -> None:
        alone = [await speak(engine, number) for number in range(ROWS)]
        assert all(len(frames) == FRAMES for frames in alone)
        others = [asyncio.create_task(speak(engine, number, 0.02, 3)) for number in range(ROWS, ROWS + 3)]
        crowd = await asyncio.gather(*(speak(engine, number, 0.003 * number) for number in range(ROWS)))
        for task in others:
            assert len(await task) == 3
        for one, many in zip(alone, crowd, strict=True):
            np.testing.assert_array_equal(one, many)

    run(work)


def test_a_cancelled_stream_stops_within_two_frames(run: Any) -> None:
    async def work(engine: AREngine) -> None:
        launched: list[Sequence[int]] = []
        model: Any = engine._steps.model
        launch = model.launch

        def counted(slots: Sequence[int], steps: Sequence[int]) -> Callable[[], FrameStep]:
            launched.append(steps)
            return launch(slots, steps)

        model.launch = counted
        assert len(await speak(engine, 0, stop_after=4)) == 4
        await asyncio.sleep(0.2)
        assert len(launched) <= 4 + 2 + 2  # two frames, and what was made while the fourth was on its way to us

    run(work)
