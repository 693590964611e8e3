"""From a video's frames to the patches that the vision tower reads: exactly transformers' ``Qwen2VLVideoProcessor``.

That class needs torchvision, of which it uses three functions; they are torch's own ``interpolate`` and arithmetic, in
the same order, so the patches are equal bit by bit. Sizes are those of ``Qwen3OmniMoeProcessor``, which overrules the
checkpoint's, and the bound on all frames together is the one that Qwen's reference has and transformers 5.22 made its
default (``cap_pixels_per_frame``).
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

from omni_ray.engine.types import VideoClip
from omni_ray.models.qwen3_omni.positions import Grid

FILES: Final = (("processor_config.json", "video_processor"), ("video_preprocessor_config.json", None),
                ("preprocessor_config.json", None))  # fmt: skip
"""Where transformers looks for a video processor's settings, and under which key: the first one that is there."""

LEAST_PIXELS: Final = 128 * 32 * 32
MOST_PIXELS: Final = 768 * 32 * 32
"""Of a frame, brought to the model's size."""
ALL_TOKENS: Final = 115_200
"""Of a video at most, as pixels of its frames: 0.9 of upstream's ``max_video_tokens``."""


@dataclass(frozen=True, slots=True)
class VideoPatches:
    """Makes patches as a checkpoint wants them.

    Attributes:
        patch: pixels of a patch's side. steps: frames of a patch. merge: patches of a token's side.
        mean, std: of the three colours, for pixels from 0 to 1.
    """

    patch: int
    steps: int
    merge: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, directory: Path) -> "VideoPatches":
        """As a checkpoint's files say."""
        settings = _settings(directory)
        return cls(
            patch=settings["patch_size"],
            steps=settings["temporal_patch_size"],
            merge=settings["merge_size"],
            mean=tuple(settings["image_mean"]),
            std=tuple(settings["image_std"]),
        )

    def grid(self, clip: VideoClip) -> Grid:
        """What a video becomes, known before any of it is computed.

        Raises:
            ValueError: frames too long and thin.
        """
        count, height, width, _ = clip.frames.shape
        factor = self.patch * self.merge
        share = ALL_TOKENS * factor * factor * self.steps // count
        most = max(min(MOST_PIXELS, share), int(LEAST_PIXELS * 1.05))
        height, width = smart_resize(height, width, factor=factor, min_pixels=LEAST_PIXELS, max_pixels=most)
        return Grid(-(-count // self.steps), height // self.patch, width // self.patch, self.steps / clip.fps)

    def patches(self, clip: VideoClip, grid: Grid) -> Tensor:
        """float32 [patches, 3 * steps * patch * patch]; patches of a token are neighbours."""
        size, merge, steps = self.patch, self.merge, self.steps
        frames = torch.from_numpy(np.array(clip.frames)).permute(0, 3, 1, 2).contiguous()
        shape = (grid.height * size, grid.width * size)
        if frames.shape[-2:] != shape:
            frames = F.interpolate(frames, size=shape, mode="bicubic", align_corners=False, antialias=True)
        mean, std = (torch.tensor(values)[:, None, None] * 255.0 for values in (self.mean, self.std))
        values = frames.float().sub_(mean).div_(std)
        missing = grid.time * steps - len(values)
        values = torch.cat((values, values[-1:].expand(missing, -1, -1, -1)))  # the last frame fills up a step
        split = values.view(
            grid.time, steps, 3, grid.height // merge, merge, size, grid.width // merge, merge, size
        )  # fmt: skip
        return split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 3 * steps * size * size)


def _settings(directory: Path) -> dict[str, Any]:
    for name, key in FILES:
        path = directory / name
        if path.is_file():
            content: dict[str, Any] = json.loads(path.read_text())
            if key is None or key in content:
                return content if key is None else content[key]
    raise FileNotFoundError(f"{directory} has none of {', '.join(name for name, _ in FILES)}")
