"""CSM's codec: code frames [n, 32] to mono sound at 24 kHz, 1920 samples a frame, by Mimi's decoder.

It streams exactly: ``streaming_mimi`` carries each request's past, so whatever the chunks, their sum is transformers'
``MimiModel.decode`` in one call.
"""

import torch
from transformers import MimiModel

from omni_ray.engine.checkpoint_files import load_parts
from omni_ray.engine.frame_codec import FrameCodec
from omni_ray.engine.options import FrameCodecOptions
from omni_ray.engine.transformers_build import build
from omni_ray.models.csm.prompt import SAMPLE_RATE
from omni_ray.models.csm.stage_checkpoint import CODEC, ENCODING, initialise_codebooks, stage_checkpoint
from omni_ray.models.csm.streaming_mimi import StreamingMimi


class CsmCode2Wav(FrameCodec):
    """Code frames int64 [n, codebooks] to float32 samples, about [-1, 1]; computed in float32."""

    sample_rate = SAMPLE_RATE

    def load(self) -> None:
        """Read Mimi's decoder and quantizer (``dummy``: draw random ones), and decode a little to warm up.

        Raises:
            ConfigError: no model, or a tensor is missing or unexpected.
        """
        options = self.context.options
        assert isinstance(options, FrameCodecOptions)
        directory, config = stage_checkpoint(self.context)
        torch.set_num_threads(options.threads)
        dummy = self.context.load_format == "dummy"
        model = build(MimiModel, config.codec_config, torch.float32, initialise=dummy)
        for part in ENCODING:
            delattr(model, part)
        if dummy:
            initialise_codebooks(model)
        else:
            load_parts(directory, model, CODEC, self.context.progress, tuple(f"{CODEC}{part}." for part in ENCODING))
        model.requires_grad_(False).to("cuda" if torch.cuda.is_available() else "cpu")
        self.use(StreamingMimi(model), config.num_codebooks, config.codec_config.codebook_size)
