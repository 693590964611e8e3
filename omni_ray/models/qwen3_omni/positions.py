"""Three-axis rotary positions (time, height, width) of Qwen3-Omni prompts, computed by us. numpy only.

What transformers' ``Qwen3OmniMoePreTrainedModelForConditionalGeneration.get_rope_index`` computes for one prompt, in
all versions from 5.17 to 5.24; unlike it we keep nothing on the module, need no lengths of audio clips (the ids say how
many placeholders there are), and serve the talker's prompt, for which upstream fails on audio together with images.

Text and sound advance all axes by one per token. An image is a grid: its tokens share one time and differ in height
and width. A video's time advances by ``tokens per second * seconds`` per step. What follows goes on behind the largest
position so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Axes = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Grid:
    """One image or video as the vision tower sees it.

    Attributes:
        time, height, width: patches, before ``spatial_merge`` x ``spatial_merge`` of them become one token.
        seconds: between two time steps of a video; of no meaning for an image, which has one.
    """

    time: int
    height: int
    width: int
    seconds: float = 1.0

    def tokens(self, spatial_merge: int) -> int:
        """Placeholders in the prompt."""
        return self.time * (self.height // spatial_merge) * (self.width // spatial_merge)


@dataclass(frozen=True, slots=True)
class RopeLayout:
    """The ids and numbers of a checkpoint's config that positions depend on.

    ``per_second`` is ``position_id_per_seconds``: 13 as published, 25 in the class defaults.
    """

    audio: int
    image: int
    video: int
    per_second: float
    spatial_merge: int


@dataclass(frozen=True, slots=True)
class RopePositions:
    """Positions of a prompt.

    Attributes:
        axes: float32 [3, n]: time, height, width. Whole numbers unless a video's steps are fractions of a second.
        delta: what is added to a token's place in the sequence to get its position behind the prompt, on all axes.
            Answers go on behind the prompt's last position, as in upstream's ``generate``; its ``rope_deltas`` count
            from the largest one, which is another where a wide video has a short sound.
    """

    axes: Axes
    delta: float


def rope_positions(ids: Sequence[int], grids: Sequence[Grid], layout: RopeLayout) -> RopePositions:
    """Positions of a prompt whose placeholders are already expanded.

    Args:
        ids: token ids [n] of the thinker's prompt, or of the talker's (user turns and the assistant's beginning).
        grids: of the images and videos whose placeholders are in ``ids``, in the order they appear there.
        layout: see ``RopeLayout``.

    Raises:
        ValueError: placeholders and grids do not fit.
    """
    if not grids:
        return RopePositions(_line(np.float32(0), len(ids)), 0.0)
    tokens = np.asarray(ids)
    media = np.isin(tokens, (layout.audio, layout.image, layout.video))
    borders = np.flatnonzero(np.diff(media)) + 1
    pieces: list[Axes] = []
    unused = list(reversed(grids))
    cursor = np.float32(0)
    for run in np.split(tokens, borders):
        visual = np.isin(run, (layout.image, layout.video))
        if not visual.any():
            piece, last = _line(cursor, len(run)), np.ones(len(run), np.bool_)
        else:
            if not unused or (wanted := unused[-1].tokens(layout.spatial_merge)) != visual.sum():
                raise ValueError(f"{visual.sum()} image or video tokens in a row, but the grid there is {unused[-1:]}")
            piece = np.empty((3, len(run)), np.float32)
            piece[:, visual] = _grid(cursor, unused.pop(), layout)
            piece[:, ~visual] = _line(cursor, len(run) - wanted)  # the sound of a video, interleaved by time
            # What follows goes behind the last stretch of one kind, as upstream, which need not hold the maximum.
            last = np.logical_and.accumulate((visual == visual[-1])[::-1])[::-1]
        pieces.append(piece)
        cursor = piece[:, last].max() + np.float32(1)
    if unused:
        raise ValueError(f"no image or video tokens for {unused}")
    axes = np.concatenate(pieces, axis=1)
    return RopePositions(axes, float(cursor - np.float32(len(tokens))))


def _line(start: np.float32, count: int) -> Axes:
    """``count`` positions that advance by one on all axes, float32 [3, count]."""
    return np.tile(np.arange(count, dtype=np.float32) + start, (3, 1))


def _grid(start: np.float32, grid: Grid, layout: RopeLayout) -> Axes:
    """Positions of an image's or video's tokens, rows of a time step after one another, float32 [3, tokens]."""
    steps = np.arange(grid.time, dtype=np.float32) * np.float32(grid.seconds) * np.float32(layout.per_second)
    rows = np.arange(grid.height // layout.spatial_merge, dtype=np.float32)
    columns = np.arange(grid.width // layout.spatial_merge, dtype=np.float32)
    return np.stack([axis.ravel() for axis in np.meshgrid(steps, rows, columns, indexing="ij")]) + start
