"""From decoded sounds and images to rows of the thinker's prompt: transformers' feature makers, then its towers."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch import Tensor
from transformers import WhisperFeatureExtractor

from omni_ray.engine.types import AudioClip, ImageClip
from omni_ray.errors import InvalidRequestError
from omni_ray.models.qwen2_5_omni.positions import ImageGrid

SHORTEST_SAMPLES: Final = 480
"""Three mel frames, the fewest that become a token. Shorter clips are padded with silence: upstream drops them."""
TOKENS_PER_SECOND: Final = 25


@dataclass(frozen=True, slots=True)
class Sounds:
    """All sounds of a prompt: float32 ``mel`` [mel bins, frames of all], and int64 ``frames`` [sounds]."""

    mel: Tensor
    frames: Tensor


@dataclass(frozen=True, slots=True)
class Pictures:
    """All images of a prompt: float32 ``patches`` [patches of all, numbers each], int64 ``patched`` [images, 3]."""

    patches: Tensor
    patched: Tensor
    grids: tuple[ImageGrid, ...]


class MediaReader:
    """Makes features as upstream's ``Qwen2_5OmniProcessor`` does; touches no weights."""

    def __init__(self, directory: Path) -> None:
        """Read ``preprocessor_config.json``; images can be read only where Pillow is installed."""
        self._sounds = WhisperFeatureExtractor.from_pretrained(directory)
        self._images: Any = None
        if find_spec("PIL") is not None:
            from transformers import Qwen2VLImageProcessorPil

            self._images = Qwen2VLImageProcessorPil.from_pretrained(directory)

    def sounds(self, clips: Sequence[AudioClip]) -> Sounds:
        """Mel features of clips, each filled up with silence to the extractor's whole length as upstream does.

        Raises:
            InvalidRequestError: an empty clip, or one that upstream would cut off.
        """
        longest = self._sounds.n_samples
        waves = []
        for clip in clips:
            if not len(clip.samples):
                raise InvalidRequestError("an audio part holds no samples", "messages")
            if clip.sample_rate != self._sounds.sampling_rate:
                raise ValueError(f"clip {clip.index} has {clip.sample_rate} Hz, not {self._sounds.sampling_rate}")
            if len(clip.samples) > longest:
                seconds = longest / clip.sample_rate
                raise InvalidRequestError(f"an audio part is longer than the {seconds:g} s that are heard", "messages")
            waves.append(np.pad(clip.samples, (0, max(0, SHORTEST_SAMPLES - len(clip.samples)))))
        made = self._sounds(
            waves,
            sampling_rate=self._sounds.sampling_rate,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="pt",
        )
        mask = made["attention_mask"].bool()
        return Sounds(made["input_features"].transpose(1, 2)[mask].T, mask.sum(1))

    def pictures(self, clips: Sequence[ImageClip]) -> Pictures:
        """Patches of images.

        Raises:
            InvalidRequestError: no Pillow here, or an image that cannot be brought to the model's size.
        """
        if self._images is None:
            raise InvalidRequestError("this server cannot read images: Pillow is not installed", "messages")
        try:
            # Without a format, images 1 or 3 pixels high would be taken for [channels, height, width].
            pixels = [clip.pixels for clip in clips]
            made = self._images(images=pixels, input_data_format="channels_last", return_tensors="pt")
        except ValueError as error:
            raise InvalidRequestError(f"an image cannot be read: {error}", "messages") from error
        merge, patched = self._images.merge_size, made["image_grid_thw"]
        grids = tuple(ImageGrid(height // merge, width // merge) for _, height, width in patched.tolist())
        return Pictures(made["pixel_values"], patched, grids)


class Towers:
    """transformers' audio and vision encoders, one prompt at a time: what a row holds depends on no other prompt."""

    def __init__(self, audio: Any, visual: Any) -> None:
        self._audio, self._visual = audio, visual

    def hear(self, sounds: Sounds) -> Tensor:
        """Rows [tokens of all sounds, hidden]."""
        rows: Tensor = self._audio(sounds.mel, feature_lens=sounds.frames).last_hidden_state
        return rows

    def see(self, pictures: Pictures) -> Tensor:
        """Rows [tokens of all images, hidden]."""
        patches = pictures.patches.to(next(self._visual.parameters()).dtype)
        rows: Tensor = self._visual(patches, grid_thw=pictures.patched).pooler_output
        return rows


def audio_tokens(frames: int) -> int:
    """Placeholders of a sound of ``frames`` mel frames (100 per second), at least 3 of them.

    transformers' ``_get_feat_extract_output_lengths``: a convolution of stride 2, then pairs are averaged.
    """
    return ((frames - 1) // 2 + 1) // 2
