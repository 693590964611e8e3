"""CSM's codec: code frames [n, 32] to mono sound at 24 kHz, 1920 samples a frame, by Mimi's decoder.

It streams exactly: ``streaming_mimi`` carries each request's past, so whatever the chunks, their sum is transformers'
``MimiModel.decode`` in one call.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import MimiModel

from omni_ray.engine.base import EngineContext
from omni_ray.engine.checkpoint_files import load_parts
from omni_ray.engine.codec import Codec, DecodeItem, Samples
from omni_ray.engine.transformers_build import build
from omni_ray.engine.types import CodeFrameChunk, Request
from omni_ray.errors import StageFailedError
from omni_ray.models.csm.options import MimiOptions
from omni_ray.models.csm.prompt import SAMPLE_RATE
from omni_ray.models.csm.stage_checkpoint import CODEC, ENCODING, initialise_codebooks, stage_checkpoint
from omni_ray.models.csm.streaming_mimi import Codes, Past, StreamingMimi


@dataclass(slots=True)
class MimiState:
    """One request: what its decoder carries, None before the first frame."""

    past: Past | None = None


class CsmCode2Wav(Codec):
    """Code frames int64 [n, codebooks] to float32 samples, about [-1, 1]; computed in float32."""

    sample_rate = SAMPLE_RATE
    channels = 1
    streaming = "state"

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        assert isinstance(context.options, MimiOptions)
        self._options = context.options
        self._codebooks = self._codebook_size = 0
        self._decoder: StreamingMimi

    def load(self) -> None:
        """Read Mimi's decoder and quantizer (``dummy``: draw random ones), and decode a little to warm up.

        Raises:
            ConfigError: no model, or a tensor is missing or unexpected.
        """
        directory, config = stage_checkpoint(self.context)
        torch.set_num_threads(self._options.threads)
        dummy = self.context.load_format == "dummy"
        model = build(MimiModel, config.codec_config, torch.float32, initialise=dummy)
        for part in ENCODING:
            delattr(model, part)
        if dummy:
            initialise_codebooks(model)
        else:
            load_parts(directory, model, CODEC, self.context.progress, tuple(f"{CODEC}{part}." for part in ENCODING))
        model.requires_grad_(False).to("cuda" if torch.cuda.is_available() else "cpu")
        self._codebooks, self._codebook_size = config.num_codebooks, config.codec_config.codebook_size
        self._decoder = StreamingMimi(model)
        silence = CodeFrameChunk(0, np.zeros((self._options.chunk_frames[0], self._codebooks), np.int64))
        self.decode([DecodeItem(MimiState(), silence, last=True)])

    def open(self, request: Request) -> MimiState:
        """See ``Codec.open``."""
        return MimiState()

    def decode(self, items: Sequence[DecodeItem]) -> list[Samples]:
        """See ``Codec.decode``.

        Raises:
            StageFailedError: frames of another width, or codes that are not in the codebook.
        """
        codes = [self._codes(item) for item in items]
        outputs = [np.zeros(0, np.float32) for _ in items]
        pasts = [item.state.past for item in items]
        for batch in self._batches(codes):
            step = self._decoder.step([pasts[i] for i in batch], [codes[i] for i in batch])
            for i, (samples, past) in zip(batch, step, strict=True):
                outputs[i], pasts[i] = samples, past
        for item, past in zip(items, pasts, strict=True):  # only now: a failed batch leaves no trace
            item.state.past = past
        return outputs

    def close(self, state: MimiState) -> None:
        """Free what was carried."""
        state.past = None

    def _codes(self, item: DecodeItem) -> Codes:
        assert isinstance(item.units, CodeFrameChunk)
        frames = item.units.frames
        if frames.ndim != 2 or frames.shape[1] != self._codebooks:
            raise StageFailedError(f"code frames of shape {frames.shape}; this codec has {self._codebooks} codebooks")
        if len(frames) and not 0 <= frames.min() <= frames.max() < self._codebook_size:
            wrong = frames.min() if frames.min() < 0 else frames.max()
            raise StageFailedError(f"code {wrong} is not in a codebook of {self._codebook_size}")
        return frames

    def _batches(self, codes: Sequence[Codes]) -> Iterator[list[int]]:
        """Indices of the items to decode together, of similar length; items without frames are in none.

        ``deterministic`` batches have one row: a request's arithmetic is then its own by construction.
        """
        limit = 1 if self._options.deterministic else self._options.batch_rows
        batch: list[int] = []
        for i in sorted((i for i, frames in enumerate(codes) if len(frames)), key=lambda i: -len(codes[i])):
            if batch and (len(batch) == limit or 2 * len(codes[i]) < len(codes[batch[0]])):
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch
