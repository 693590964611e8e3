"""Higgs Audio v2's codec: code frames [n, 8] to mono sound at 24 kHz, 960 samples a frame, by DAC's decoder.

Its convolutions look as far ahead as back, 11 frames at the published shape. It streams exactly: a frame's samples are
given out once the frames that they depend on are there, so whatever the chunks, their sum is upstream's
``HiggsAudioV2TokenizerModel.decode`` in one call. (vLLM-Omni holds four frames back: less delay, and other samples.)
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from omni_ray.engine.base import EngineContext
from omni_ray.engine.codec import Samples, WindowCodec
from omni_ray.errors import StageFailedError
from omni_ray.models.higgs_audio_v2.codec_modules import CodecDecoder
from omni_ray.models.higgs_audio_v2.codec_weights import load_half
from omni_ray.models.higgs_audio_v2.options import HiggsCodecOptions
from omni_ray.models.higgs_audio_v2.prompt import SAMPLE_RATE
from omni_ray.models.higgs_audio_v2.stage_checkpoint import codec_checkpoint


class HiggsCode2Wav(WindowCodec):
    """Code frames int64 [n, codebooks] to float32 samples, about [-1, 1]; computed in float32.

    Ids above the codebook (the talker's begin and end, where a codebook ends early) are its last code, as in upstream's
    ``HiggsAudioV2Processor.batch_decode``.
    """

    sample_rate = SAMPLE_RATE
    channels = 1

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        assert isinstance(context.options, HiggsCodecOptions)
        self._options = context.options
        self._codebooks = self._codebook_size = 0
        self._decoder: CodecDecoder

    def load(self) -> None:
        """Read the decoding half (``dummy``: draw a random one), and decode a little to warm up.

        Raises:
            ConfigError: no model, a tensor is missing or unexpected, or ``left_context`` is too small for it.
        """
        directory, config = codec_checkpoint(self.context, self._options.codec)
        torch.set_num_threads(self._options.threads)
        self._decoder = cast(CodecDecoder, load_half(CodecDecoder, directory, config, self.context))
        self._codebooks, self._codebook_size = config.num_quantizers, config.codebook_size
        self.samples_per_frame = config.hop_length
        self.use_context(*self._decoder.context())
        self.decode_windows([np.zeros((self._options.chunk_frames[0], self._codebooks), np.int64)])

    @torch.inference_mode()
    def decode_windows(self, windows: Sequence[NDArray[np.int64]]) -> list[Samples]:
        """See ``WindowCodec.decode_windows``. Only windows of equal length share a batch: padding would be heard.

        ``deterministic`` batches have one row: a request's arithmetic is then its own by construction.

        Raises:
            StageFailedError: frames of another width, or a negative code.
        """
        for frames in windows:
            if frames.shape[1] != self._codebooks or frames.min() < 0:
                shape = f"{frames.shape}, least code {frames.min()}"
                raise StageFailedError(f"code frames of shape {shape}; this codec has {self._codebooks} codebooks")
        alike: defaultdict[int, list[int]] = defaultdict(list)
        for i, frames in enumerate(windows):
            alike[len(frames)].append(i)
        limit = 1 if self._options.deterministic else self._options.batch_rows
        outputs: dict[int, Samples] = {}
        for indices in alike.values():
            for start in range(0, len(indices), limit):
                batch = indices[start : start + limit]
                codes = np.stack([windows[i] for i in batch]).clip(max=self._codebook_size - 1)
                sound = self._decoder(torch.from_numpy(codes).to(self._decoder.fc2.weight.device)).cpu().numpy()
                outputs.update(zip(batch, sound, strict=True))
        return [outputs[i] for i in range(len(windows))]
