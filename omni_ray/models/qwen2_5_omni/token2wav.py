"""Qwen2.5-Omni's codec: an answer's codes [n, 1] to mono sound at 24 kHz, 480 samples a code, all at once.

A diffusion makes the mel spectrogram (``flow``), BigVGAN the sound; both are transformers'. Every code may change every
sample, so nothing can be streamed (``whole``). Upstream starts from random noise; here it is a function of the seed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import Qwen2_5OmniToken2WavModel

from omni_ray.engine.base import EngineContext
from omni_ray.engine.checkpoint_files import load_parts
from omni_ray.engine.codec import Codec, DecodeItem, Samples
from omni_ray.engine.transformers_build import build
from omni_ray.engine.types import CodeFrameChunk, Request
from omni_ray.errors import StageFailedError
from omni_ray.models.qwen2_5_omni.flow import mel_of, start_noise
from omni_ray.models.qwen2_5_omni.options import Token2WavOptions
from omni_ray.models.qwen2_5_omni.speakers import load_speakers, random_speakers
from omni_ray.models.qwen2_5_omni.stage_checkpoint import stage_checkpoint

PREFIX: Final = "token2wav."
SAMPLE_RATE: Final = 24_000

Codes: TypeAlias = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ask:
    """What of a request its sound depends on."""

    seed: int
    voice: str | None


class Qwen2_5OmniToken2Wav(Codec):
    """Codes int64 [n, 1] to float32 samples [480 * n] in [-1, 1]; float32, one request after the other.

    An answer without codes is no sound; one code is enough for some.
    """

    sample_rate = SAMPLE_RATE
    streaming = "whole"

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        assert isinstance(context.options, Token2WavOptions)
        self._options = context.options

    def load(self) -> None:
        """Read ``token2wav.*`` and the speakers (``dummy``: draw random ones), and decode one code to warm up.

        Raises:
            ConfigError: no model, a tensor is missing or unexpected, or speakers that do not fit.
        """
        model, directory, config = stage_checkpoint(self.context, speaks=True)
        torch.set_num_threads(self._options.threads)
        dummy = self.context.load_format == "dummy"
        module = build(Qwen2_5OmniToken2WavModel, config.token2wav_config, torch.float32, initialise=dummy)
        if not dummy:
            load_parts(directory, module, PREFIX, self.context.progress)
        self._module = module.requires_grad_(False)
        self._speakers = random_speakers(config) if dummy else load_speakers(model, directory, config)
        dit = config.token2wav_config.dit_config
        self._repeats, self._bins, self._codes = dit.repeats, dit.mel_dim, dit.num_embeds + 1
        self._most_codes = dit.max_position_embeddings // dit.repeats
        self._decode(Ask(0, None), np.zeros((1, 1), np.int64))

    def open(self, request: Request) -> Ask:
        """See ``Codec.open``."""
        return Ask(request.seed, request.voice)

    def decode(self, items: Sequence[DecodeItem]) -> list[Samples]:
        """See ``Codec.decode``.

        Raises:
            InvalidRequestError: the voice is unknown.
            StageFailedError: frames of another width, codes that are not in the codebook, or too many.
        """
        return [self._decode(item.state, self._checked(item)) for item in items]

    def _decode(self, ask: Ask, codes: Codes) -> Samples:
        if not len(codes):
            return np.zeros(0, np.float32)
        speaker = self._speakers.of(ask.voice)
        noise = torch.from_numpy(start_noise(ask.seed, len(codes) * self._repeats, self._bins))[None]
        with torch.inference_mode():
            mel = mel_of(
                self._module.code2wav_dit_model,
                torch.from_numpy(codes.T.copy()),
                speaker.cond,
                speaker.ref_mel,
                noise,
                self._options.num_steps,
            )
            samples: Samples = self._module.code2wav_bigvgan_model(mel).numpy()
        return samples

    def _checked(self, item: DecodeItem) -> Codes:
        assert isinstance(item.units, CodeFrameChunk)
        frames = item.units.frames
        if frames.ndim != 2 or frames.shape[1] != 1:
            raise StageFailedError(f"code frames of shape {frames.shape}; this codec has one codebook")
        if len(frames) > self._most_codes:
            raise StageFailedError(f"{len(frames)} codes are more than the {self._most_codes} decoded at once")
        if len(frames) and not 0 <= frames.min() <= frames.max() < self._codes:
            wrong = frames.min() if frames.min() < 0 else frames.max()
            raise StageFailedError(f"code {wrong} is not in a codebook of {self._codes}")
        return frames
