"""Sounds and images as Qwen's towers read them: mel features and patches, by transformers' own feature makers.

``WhisperFeatureExtractor`` and ``Qwen2VLImageProcessorPil``, as upstream's processors of whole prompts use them. They
touch no weights and are safe to use in any thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from transformers import WhisperFeatureExtractor

from omni_ray.engine.types import AudioClip, ImageClip
from omni_ray.errors import InvalidRequestError


@dataclass(frozen=True, slots=True)
class Sounds:
    """All sounds of a prompt: float32 ``mel`` [mel bins, frames of all], and int64 ``frames`` [sounds]."""

    mel: Tensor
    frames: Tensor


class SoundReader:
    """Makes mel features of a prompt's sounds, in one call as upstream: a sound's last frames see its padding."""

    def __init__(self, directory: Path, shortest: int, *, fill: bool) -> None:
        """Read ``preprocessor_config.json``.

        Args:
            directory: of the checkpoint.
            shortest: samples; shorter sounds are followed by silence.
            fill: every sound is followed by silence up to the extractor's whole length, and none may be longer; else
                up to the prompt's longest.
        """
        self._maker = WhisperFeatureExtractor.from_pretrained(directory)
        self._shortest, self._fill = shortest, fill

    def read(self, clips: Sequence[AudioClip]) -> Sounds:
        """Mel features of all sounds of a prompt.

        Raises:
            InvalidRequestError: an empty clip, or one that upstream would cut off.
        """
        rate, longest = self._maker.sampling_rate, self._maker.n_samples
        waves = []
        for clip in clips:
            if not len(clip.samples):
                raise InvalidRequestError("an audio part holds no samples", "messages")
            if clip.sample_rate != rate:
                raise ValueError(f"clip {clip.index} has {clip.sample_rate} Hz, not {rate}")
            if self._fill and len(clip.samples) > longest:
                seconds = longest / rate
                raise InvalidRequestError(f"an audio part is longer than the {seconds:g} s that are heard", "messages")
            waves.append(np.pad(clip.samples, (0, max(0, self._shortest - len(clip.samples)))))
        made = self._maker(
            waves,
            sampling_rate=rate,
            padding="max_length" if self._fill else True,
            truncation=self._fill,
            return_attention_mask=True,
            return_tensors="pt",
        )
        mask = made["attention_mask"].bool()
        return Sounds(made["input_features"].transpose(1, 2)[mask].T, mask.sum(1))


class ImageReader:
    """Makes patches of images; only where Pillow is installed."""

    def __init__(self, directory: Path) -> None:
        """Read ``preprocessor_config.json``."""
        self._maker: Any = None
        if find_spec("PIL") is not None:
            from transformers import Qwen2VLImageProcessorPil

            self._maker = Qwen2VLImageProcessorPil.from_pretrained(directory)

    @property
    def merge(self) -> int:
        """Patches on each side of a token's square."""
        size: int = self._maker.merge_size
        return size

    def read(self, clips: Sequence[ImageClip]) -> tuple[Tensor, Tensor]:
        """Float32 patches [patches of all, numbers each], and int64 [images, 3]: each one's time, height and width.

        Raises:
            InvalidRequestError: no Pillow here, or an image that cannot be brought to the model's size.
        """
        if self._maker is None:
            raise InvalidRequestError("this server cannot read images: Pillow is not installed", "messages")
        try:
            # Without a format, images 1 or 3 pixels high would be taken for [channels, height, width].
            made = self._maker(
                images=[clip.pixels for clip in clips], input_data_format="channels_last", return_tensors="pt"
            )
        except ValueError as error:
            raise InvalidRequestError(f"an image cannot be read: {error}", "messages") from error
        return made["pixel_values"], made["image_grid_thw"]
