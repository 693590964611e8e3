"""From decoded sound, pictures and videos to what the thinker's towers read, and from there to rows of its prompt.

``MediaReader`` makes features (mel, patches) as ``transformers_media`` does, and those of videos itself
(``video_patches``): transformers' class for them, and so its whole processor, needs torchvision. It touches no weights
and is safe to use in any thread. ``Towers`` are transformers' audio and vision encoders.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from omni_ray.engine.transformers_media import ImageReader, SoundReader, Sounds
from omni_ray.engine.types import AudioClip, ImageClip, VideoClip
from omni_ray.errors import InvalidRequestError
from omni_ray.models.qwen3_omni.positions import Grid
from omni_ray.models.qwen3_omni.video_patches import VideoPatches

SHORTEST_SAMPLES: Final = 400
"""One window of the spectrogram. Shorter clips are padded with silence: upstream fails on them (cases.md C32)."""

BLOCK_FRAMES: Final = 100
TOKENS_PER_SECOND: Final = 13


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
        self._sounds = SoundReader(directory, SHORTEST_SAMPLES, fill=False)
        self._images = ImageReader(directory)
        self._videos = VideoPatches.of(directory)

    def sound(self, clips: Sequence[AudioClip]) -> Sounds:
        """See ``SoundReader.read``."""
        return self._sounds.read(clips)

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
        patches, grid = self._images.read([clip])
        return patches, Grid(*grid[0].tolist())


class Towers:
    """The audio and the vision encoder, computed for one prompt at a time: what a row holds depends on no other one."""

    def __init__(self, audio: nn.Module, visual: nn.Module) -> None:
        self._audio = audio
        self._visual = visual

    def hear(self, sound: Sounds) -> Tensor:
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
    return blocks * TOKENS_PER_SECOND + rest
