"""What a stage had made of a request before a replica died, as far as the ingress has it: the input of a takeover.

Complete from position 0 on: an engine that is given one makes the same outputs again, without computing what is
written here where it can, and goes on behind it.
"""

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from omni_ray.engine.types import CodeFrameChunk, Finish, Output, TextChunk, TranscriptChunk


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

    def has_frame(self, output: Output) -> bool:
        """Whether this is a code frame that is here already."""
        return isinstance(output, CodeFrameChunk) and self.frames is not None and output.position < len(self.frames)

    def agrees(self, output: Output) -> bool:
        """Whether tokens or frames that were made again are those that were made before, as far as they are here."""
        if isinstance(output, CodeFrameChunk) and self.frames is not None:
            known = self.frames[output.position : output.position + len(output.frames)]
            return np.array_equal(output.frames[: len(known)], known)
        if isinstance(output, TextChunk):
            return all(a == b for a, b in zip(output.token_ids, self.token_ids[output.position :], strict=False))
        return True
