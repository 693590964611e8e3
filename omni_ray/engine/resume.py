"""What a stage had made of a request before a replica died, as far as the ingress has it: the input of a takeover.

Complete from position 0 on: an engine that is given one makes the same outputs again, without computing what is
written here where it can, and goes on behind it.
"""

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from omni_ray.engine.types import Finish, TextChunk, TranscriptChunk


@dataclass(frozen=True, slots=True)
class Resume:
    """One stage's part of a request that goes on elsewhere.

    Attributes:
        text, transcripts: chunks, in order of position.
        frames: int64 [n, codebooks], code frames 0 to n - 1; None if there are none.
        samples: of sound that were heard; the engine gives out none of them again.
        finish: how the stage ended, if it did: then everything it made is here, latents and prompts excepted.
    """

    text: tuple[TextChunk, ...] = ()
    transcripts: tuple[TranscriptChunk, ...] = ()
    frames: NDArray[np.int64] | None = None
    samples: int = 0
    finish: Finish | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Tokens of ``text``, the first one at position 0."""
        return tuple(chain.from_iterable(chunk.token_ids for chunk in self.text))
