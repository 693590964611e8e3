"""Codecs that carry each request's past, whatever their decoder is: what a frame may be, and who shares a batch."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from omni_ray.engine.base import EngineContext
from omni_ray.engine.codec import Codec, DecodeItem, Samples
from omni_ray.engine.options import FrameCodecOptions
from omni_ray.engine.types import CodeFrameChunk, Request
from omni_ray.errors import StageFailedError

Codes: TypeAlias = NDArray[np.int64]
"""Code frames of one request, [n, codebooks]."""


def padded_codes(codes: Sequence[Codes], longest: int) -> Codes:
    """Rows of codes [n, Q] as one int64 [B, Q, longest]; padding is code 0."""
    padded = np.zeros((len(codes), codes[0].shape[1], longest), np.int64)
    for row, frames in zip(padded, codes, strict=True):
        row[:, : len(frames)] = frames.T
    return padded


class FrameDecoder(ABC):
    """Decodes the next frames of several requests in one batch; what it carries of each is its own."""

    @abstractmethod
    def step(self, pasts: Sequence[Any], codes: Sequence[Codes]) -> Sequence[tuple[Samples, Any]]:
        """The samples of each request that became final, and what to give to its next step.

        Args:
            pasts: what the last step gave for each request; None at its start. A step that fails changes none.
            codes: int64 [n, codebooks] of each, n >= 1; of no more requests than ``rows``.
        """

    def rows(self, frames: int) -> int | None:
        """The most requests with up to ``frames`` frames each that a step has room for; None: any number."""
        return None

    def release(self, past: Any) -> None:  # noqa: B027 most decoders hold nothing of a request but its past
        """The request is over."""


@dataclass(slots=True)
class FrameState:
    """One request.

    Attributes:
        past: what its decoder carries; None before the first frame.
        samples: of frames that a step decoded before another step of the same ``decode`` failed. The decoder may not
            be able to go back, so these wait for the item to come again.
    """

    past: Any = None
    samples: Samples | None = None


class FrameCodec(Codec, ABC):
    """Code frames int64 [n, codebooks] to mono float32 samples; ``load`` ends with ``use``."""

    channels = 1
    streaming = "state"

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        assert isinstance(context.options, FrameCodecOptions)
        self._batch_rows = 1 if context.options.deterministic else context.options.batch_rows
        self._first_frames = context.options.chunk_frames[0]
        self._codebooks = self._codebook_size = 0
        self._decoder: FrameDecoder

    def use(self, decoder: FrameDecoder, codebooks: int, codebook_size: int) -> None:
        """Decode with ``decoder``, now a little to warm up."""
        self._decoder, self._codebooks, self._codebook_size = decoder, codebooks, codebook_size
        silence, state = CodeFrameChunk(0, np.zeros((self._first_frames, codebooks), np.int64)), FrameState()
        self.decode([DecodeItem(state, silence, last=True)])
        self.close(state)

    def open(self, request: Request) -> FrameState:
        """See ``Codec.open``."""
        return FrameState()

    def decode(self, items: Sequence[DecodeItem]) -> list[Samples]:
        """See ``Codec.decode``.

        Raises:
            StageFailedError: frames of another width, or codes that are not in the codebook.
        """
        codes = [self._codes(item) for item in items]
        states: list[FrameState] = [item.state for item in items]
        for batch in self._batches(states, codes):
            step = self._decoder.step([states[i].past for i in batch], [codes[i] for i in batch])
            for i, (samples, past) in zip(batch, step, strict=True):
                states[i].samples, states[i].past = samples, past
        outputs = [np.zeros(0, np.float32) if state.samples is None else state.samples for state in states]
        for state in states:  # only now: nothing can fail any more
            state.samples = None
        return outputs

    def close(self, state: FrameState) -> None:
        """Free what was carried."""
        if state.past is not None:
            self._decoder.release(state.past)
        state.past = state.samples = None

    def _codes(self, item: DecodeItem) -> Codes:
        assert isinstance(item.units, CodeFrameChunk)
        frames = item.units.frames
        if frames.ndim != 2 or frames.shape[1] != self._codebooks:
            raise StageFailedError(f"code frames of shape {frames.shape}; this codec has {self._codebooks} codebooks")
        if len(frames) and not 0 <= frames.min() <= frames.max() < self._codebook_size:
            wrong = frames.min() if frames.min() < 0 else frames.max()
            raise StageFailedError(f"code {wrong} is not in a codebook of {self._codebook_size}")
        return frames

    def _batches(self, states: Sequence[FrameState], codes: Sequence[Codes]) -> Iterator[list[int]]:
        """Indices of the items to decode together; items without frames, or whose frames are decoded, are in none.

        Rows are padded to the longest, so only rows at least half as long share a batch. ``deterministic`` batches have
        one row and no padding: a request's arithmetic is then its own by construction.
        """
        batch: list[int] = []
        rows = self._batch_rows
        to_do = [i for i, frames in enumerate(codes) if len(frames) and states[i].samples is None]
        for i in sorted(to_do, key=lambda i: -len(codes[i])):
            if batch and (len(batch) == rows or 2 * len(codes[i]) < len(codes[batch[0]])):
                yield batch
                batch = []
            if not batch:
                rows = min(self._batch_rows, self._decoder.rows(len(codes[i])) or self._batch_rows)
            batch.append(i)
        if batch:
            yield batch
