"""From decoded sound, pictures and videos to what the thinker's towers read, and from there to rows of its prompt.

``MediaReader`` makes features (mel, patches) with transformers' ``WhisperFeatureExtractor`` and
``Qwen2VLImageProcessorPil``, and those of videos itself (``video_patches``): transformers' class for them, and so its
whole processor, needs torchvision. It touches no weights and is safe to use in any thread. ``Towers`` are transformers'
audio and vision encoders.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from transformers import WhisperFeatureExtractor

from omni_ray.engine.types import AudioClip, ImageClip, VideoClip
from omni_ray.errors import InvalidRequestError
from omni_ray.models.qwen3_omni.positions import Grid
from omni_ray.models.qwen3_omni.video_patches import VideoPatches

SHORTEST_SAMPLES: Final = 400
"""One window of the spectrogram. Shorter clips are padded with silence: upstream fails on them (cases.md C32)."""

BLOCK_FRAMES: Final = 100
BLOCK_TOKENS: Final = 13


@dataclass(frozen=True, slots=True)
class Sound:
    """All clips of a prompt.

    Attributes:
        mel: float32 [mel bins, frames of all clips].
        frames: int64 [clips].
    """

    mel: Tensor
    frames: Tensor


@dataclass(frozen=True, slots=True)
class Pictures:
    """All images and videos of a prompt: float32 ``patches`` [patches of all, numbers per patch], and ``grids``."""

    patches: Tensor
    grids: tuple[Grid, ...]


@dataclass(frozen=True, slots=True)
class VisualRows:
    """Rows [tokens, hidden] for the prompt, and those that are added behind its first layers."""

    rows: Tensor
    deepstack: tuple[Tensor, ...]


class MediaReader:
    """Makes features as upstream's processor does for the clips of one prompt."""

    def __init__(self, directory: Path) -> None:
        """Read ``preprocessor_config.json``; images can be read only where Pillow is installed."""
        self._sounds = WhisperFeatureExtractor.from_pretrained(directory)
        self._images: Any = None
        if find_spec("PIL") is not None:
            from transformers import Qwen2VLImageProcessorPil

            self._images = Qwen2VLImageProcessorPil.from_pretrained(directory)
        self._videos = VideoPatches.of(directory)

    def sound(self, clips: Sequence[AudioClip]) -> Sound:
        """Mel features of all clips of a prompt, in one call as upstream: a clip's last frames see its padding.

        Raises:
            InvalidRequestError: an empty clip.
        """
        waves = []
        for clip in clips:
            if not len(clip.samples):
                raise InvalidRequestError("an audio part holds no samples", "messages")
            if clip.sample_rate != self._sounds.sampling_rate:
                raise ValueError(f"clip {clip.index} has {clip.sample_rate} Hz, not {self._sounds.sampling_rate}")
            waves.append(np.pad(clip.samples, (0, max(0, SHORTEST_SAMPLES - len(clip.samples)))))
        features = self._sounds(
            waves,
            sampling_rate=self._sounds.sampling_rate,
            padding=True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        mask = features["attention_mask"].bool()
        return Sound(features["input_features"].transpose(1, 2)[mask].T, mask.sum(1))

    def pictures(self, clips: Sequence[ImageClip | VideoClip], room: int) -> Pictures:
        """Patches of all images and videos of a prompt, in order.

        Args:
            clips: at least one.
            room: tokens that all videos may become; beyond it they are refused before anything is computed.

        Raises:
            InvalidRequestError: no Pillow here, a picture that cannot be brought to the model's size, or no room.
        """
        videos = self._video_grids([clip for clip in clips if isinstance(clip, VideoClip)], room)
        parts = [
            (self._videos.patches(clip, videos[clip.index]), videos[clip.index])
            if isinstance(clip, VideoClip)
            else self._image(clip)
            for clip in clips
        ]
        return Pictures(torch.cat([patches for patches, _ in parts]), tuple(grid for _, grid in parts))

    def _video_grids(self, clips: Sequence[VideoClip], room: int) -> dict[int, Grid]:
        try:
            grids = {clip.index: self._videos.grid(clip) for clip in clips}
        except ValueError as error:
            raise InvalidRequestError(f"a video cannot be read: {error}", "messages") from error
        tokens = sum(grid.tokens(self._videos.merge) for grid in grids.values())
        if tokens > room:
            raise InvalidRequestError(
                f"the videos make {tokens} tokens; this server takes at most {room} in a chat: send shorter ones",
                "messages",
            )
        return grids

    def _image(self, clip: ImageClip) -> tuple[Tensor, Grid]:
        if self._images is None:
            raise InvalidRequestError("this server cannot read images: Pillow is not installed", "messages")
        try:
            # Without a format, pictures 1 or 3 pixels high would be taken for [channels, height, width].
            features = self._images(images=[clip.pixels], input_data_format="channels_last", return_tensors="pt")
        except ValueError as error:
            raise InvalidRequestError(f"an image cannot be read: {error}", "messages") from error
        return features["pixel_values"], Grid(*features["image_grid_thw"][0].tolist())


class Towers:
    """The audio and the vision encoder, computed for one prompt at a time: what a row holds depends on no other one."""

    def __init__(self, audio: nn.Module, visual: nn.Module) -> None:
        self._audio = audio
        self._visual = visual

    def hear(self, sound: Sound) -> Tensor:
        """Rows [tokens of all clips, hidden]."""
        rows: Tensor = self._audio(sound.mel, feature_lens=sound.frames).last_hidden_state
        return rows

    def see(self, pictures: Pictures) -> VisualRows:
        """Rows of all images and videos, one after the other."""
        grids = torch.tensor([[grid.time, grid.height, grid.width] for grid in pictures.grids])
        patches = pictures.patches.to(next(self._visual.parameters()).dtype)
        seen = self._visual(patches, grid_thw=grids)
        return VisualRows(seen.pooler_output, tuple(seen.deepstack_features))


def audio_tokens(frames: int) -> int:
    """Placeholders of a clip of ``frames`` mel frames (100 per second): 13 per second, fewer for the rest.

    transformers' ``_get_feat_extract_output_lengths``: three convolutions of stride 2 over blocks of a second.
    """
    blocks, rest = divmod(frames, BLOCK_FRAMES)
    for _ in range(3):
        rest = (rest - 1) // 2 + 1
    return blocks * BLOCK_TOKENS + rest
