"""The codec of Qwen3-Omni: code frames [n, 16] to mono sound at 24 kHz, 1920 samples a frame.

By default it streams exactly: ``streaming_code2wav`` carries each request's past, so whatever the chunks, their sum is
transformers' ``Qwen3OmniMoeCode2Wav`` in one call (``1920 n - 555`` samples). ``context: truncated`` decodes upstream's
overlapping windows instead (``truncated_code2wav``): an approximation, there to be compared with.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import torch
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omni_ray.engine.base import EngineContext
from omni_ray.engine.checkpoint_files import load_parts
from omni_ray.engine.codec import Codec, DecodeItem, Samples
from omni_ray.engine.precision import compute_dtype
from omni_ray.engine.transformers_build import build
from omni_ray.engine.types import CodeFrameChunk, Request
from omni_ray.errors import StageFailedError
from omni_ray.models.qwen3_omni.options import Code2WavOptions
from omni_ray.models.qwen3_omni.stage_checkpoint import stage_checkpoint
from omni_ray.models.qwen3_omni.streaming_code2wav import Codes, StreamingCode2Wav
from omni_ray.models.qwen3_omni.truncated_code2wav import TruncatedCode2Wav

SAMPLE_RATE: Final = 24_000
"""Hz. The checkpoint's config does not say it; 1920 samples a frame make 12.5 frames a second."""
PREFIX: Final = "code2wav."


class Decoder(Protocol):
    """Decodes the next frames of several requests in one batch; what it carries of each is its own."""

    def step(self, pasts: Sequence[Any], codes: Sequence[Codes]) -> Sequence[tuple[Samples, Any]]:
        """See ``StreamingCode2Wav.step``."""

    def release(self, past: Any) -> None:
        """The request is over."""


@dataclass(slots=True)
class Code2WavState:
    """One request: what its decoder carries, None before the first frame."""

    past: Any = None


class Qwen3OmniCode2Wav(Codec):
    """Code frames int64 [n, codebooks] to float32 samples in [-1, 1]."""

    sample_rate = SAMPLE_RATE
    channels = 1
    streaming = "state"

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        assert isinstance(context.options, Code2WavOptions)
        self._options = context.options
        self._codebooks = self._codebook_size = 0
        self._decoder: Decoder

    def load(self) -> None:
        """Read the tensors under ``code2wav.`` (``dummy``: draw random ones), and decode a little to warm up.

        Raises:
            ConfigError: no model, no audio in this checkpoint, or a tensor is missing or unexpected.
        """
        options = self._options
        directory, config = stage_checkpoint(self.context, speaks=True)
        torch.set_num_threads(options.threads)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        dummy = self.context.load_format == "dummy"
        dtype = compute_dtype("float32" if options.dtype == "tf32" else options.dtype)
        with device:
            model = build(Qwen3OmniMoeCode2Wav, config.code2wav_config, dtype, initialise=dummy)
        if not dummy:
            load_parts(directory, model, PREFIX, self.context.progress)
        model.requires_grad_(False)
        self._codebooks, self._codebook_size = model.config.num_quantizers, model.config.codebook_size
        if options.context == "truncated":
            self._decoder = TruncatedCode2Wav(model, options.truncated_left())
        elif device.type == "cuda":
            self._decoder = self._captured(model)
        else:
            self._decoder = StreamingCode2Wav(model)
        self._warm_up()

    def open(self, request: Request) -> Code2WavState:
        """See ``Codec.open``."""
        return Code2WavState()

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

    def close(self, state: Code2WavState) -> None:
        """Free what was carried, some 5 MB at the published shape."""
        if state.past is not None:
            self._decoder.release(state.past)
        state.past = None

    def _captured(self, model: Qwen3OmniMoeCode2Wav) -> Decoder:
        """Steps as CUDA graphs; Triton is needed for it, and a GPU."""
        from omni_ray.models.qwen3_omni.captured_code2wav import CapturedCode2Wav

        options = self._options
        rows = 1 if options.deterministic else options.batch_rows
        decoder = CapturedCode2Wav(model, options.max_num_seqs, rows, options.chunk_frames, options.dtype == "tf32")
        decoder.capture(decoder.shapes())
        return decoder

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
        """Indices of the items to decode together; items without frames are in none.

        Rows are padded to the longest, so only rows at least half as long share a batch. ``deterministic`` batches have
        one row and no padding: a request's arithmetic is then its own by construction.
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

    def _warm_up(self) -> None:
        silence = CodeFrameChunk(0, np.zeros((self._options.chunk_frames[0], self._codebooks), np.int64))
        state = Code2WavState()
        self.decode([DecodeItem(state, silence, last=True)])
        self.close(state)
