"""From decoded sounds and images to rows of the thinker's prompt: transformers' feature makers, then its towers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from omni_ray.engine.transformers_media import ImageReader, SoundReader, Sounds
from omni_ray.engine.types import AudioClip, ImageClip
from omni_ray.models.qwen2_5_omni.positions import ImageGrid

SHORTEST_SAMPLES: Final = 480
"""Three mel frames, the fewest that become a token. Shorter clips are padded with silence: upstream drops them."""
TOKENS_PER_SECOND: Final = 25


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
        self._sounds = SoundReader(directory, SHORTEST_SAMPLES, fill=True)
        self._images = ImageReader(directory)

    def sounds(self, clips: Sequence[AudioClip]) -> Sounds:
        """See ``SoundReader.read``; each sound is filled up to the extractor's whole length, as upstream does."""
        return self._sounds.read(clips)

    def pictures(self, clips: Sequence[ImageClip]) -> Pictures:
        """See ``ImageReader.read``."""
        patches, patched = self._images.read(clips)
        merge = self._images.merge
        grids = tuple(ImageGrid(height // merge, width // merge) for _, height, width in patched.tolist())
        return Pictures(patches, patched, grids)


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
