"""The codec of Qwen3-Omni: code frames [n, 16] to mono sound at 24 kHz, 1920 samples a frame.

By default it streams exactly: ``streaming_code2wav`` carries each request's past, so whatever the chunks, their sum is
transformers' ``Qwen3OmniMoeCode2Wav`` in one call (``1920 n - 555`` samples). ``context: truncated`` decodes upstream's
overlapping windows instead (``truncated_code2wav``): an approximation, there to be compared with.
"""

from typing import Final

import torch
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omni_ray.engine.checkpoint_files import load_parts
from omni_ray.engine.frame_codec import FrameCodec, FrameDecoder
from omni_ray.engine.precision import compute_dtype
from omni_ray.engine.transformers_build import build
from omni_ray.models.qwen3_omni.options import Code2WavOptions
from omni_ray.models.qwen3_omni.stage_checkpoint import stage_checkpoint
from omni_ray.models.qwen3_omni.streaming_code2wav import StreamingCode2Wav
from omni_ray.models.qwen3_omni.truncated_code2wav import TruncatedCode2Wav

SAMPLE_RATE: Final = 24_000
"""Hz. The checkpoint's config does not say it; 1920 samples a frame make 12.5 frames a second."""
PREFIX: Final = "code2wav."


class Qwen3OmniCode2Wav(FrameCodec):
    """Code frames int64 [n, codebooks] to float32 samples in [-1, 1]."""

    sample_rate = SAMPLE_RATE

    def load(self) -> None:
        """Read the tensors under ``code2wav.`` (``dummy``: draw random ones), and decode a little to warm up.

        Raises:
            ConfigError: no model, no audio in this checkpoint, or a tensor is missing or unexpected.
        """
        options = self.context.options
        assert isinstance(options, Code2WavOptions)
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
        decoder: FrameDecoder
        if options.context == "truncated":
            decoder = TruncatedCode2Wav(model, options.truncated_left())
        elif device.type == "cuda":
            decoder = _captured(model, options)
        else:
            decoder = StreamingCode2Wav(model)
        self.use(decoder, model.config.num_quantizers, model.config.codebook_size)


def _captured(model: Qwen3OmniMoeCode2Wav, options: Code2WavOptions) -> FrameDecoder:
    """Steps as CUDA graphs; Triton is needed for it, and a GPU."""
    from omni_ray.models.qwen3_omni.captured_code2wav import CapturedCode2Wav

    rows = 1 if options.deterministic else options.batch_rows
    decoder = CapturedCode2Wav(model, options.max_num_seqs, rows, options.chunk_frames, options.dtype == "tf32")
    decoder.capture(decoder.shapes())
    return decoder
