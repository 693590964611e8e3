"""The talker: a tenth of a second of sine for each letter."""

from collections.abc import AsyncGenerator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_ray.engine.per_request import PerRequestModel
from omni_ray.engine.resume import Resume
from omni_ray.engine.threads import Threads
from omni_ray.engine.types import AudioChunk, Finish, Output, Request, Usage
from tone_tts.extras import Tone

RATE = 16_000
LENGTH = 1_600


def tone(letter: str, base_hz: float) -> NDArray[np.float32]:
    """Samples [1600] of one letter."""
    hz = base_hz * 2 ** ((ord(letter) - ord("a")) / 12)
    return (0.3 * np.sin(2 * np.pi * hz / RATE * np.arange(LENGTH))).astype(np.float32)


class ToneTalker(PerRequestModel):
    """Letters in, sound out."""

    def load(self) -> None:
        """Nothing to load."""

    async def generate(
        self,
        request: Request,
        inputs: Mapping[str, AsyncGenerator[Any, None]],
        threads: Threads,
        resume: Resume | None = None,
    ) -> AsyncGenerator[Output, None]:
        """See ``PerRequestModel.generate``."""
        wanted = request.extras.get("tone", Tone())
        (letters,) = inputs.values()
        count = 0
        async for letter in letters:
            yield AudioChunk(count * LENGTH, await threads.run(tone, letter, wanted.base_hz), RATE)
            count += 1
        yield Finish(usage=Usage(audio_tokens=count))
