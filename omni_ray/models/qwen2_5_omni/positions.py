"""Three-axis rotary positions (time, height, width) of prompts of text, sound and images. numpy only.

What transformers' ``get_rope_index`` of this family computes for one prompt, without its state on the module. Text and
sound advance all axes by one per token. An image's tokens share one time and differ in height and width; what follows
goes on behind its largest position.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ImageGrid:
    """An image's tokens in the prompt: rows and columns of them."""

    height: int
    width: int

    @property
    def tokens(self) -> int:
        """Placeholders in the prompt."""
        return self.height * self.width


@dataclass(frozen=True, slots=True)
class RopePositions:
    """float32 ``axes`` [3, n]; ``delta`` is added to a later token's place to get its position on all axes."""

    axes: NDArray[np.float32]
    delta: float


def rope_positions(ids: Sequence[int], image: int, grids: Sequence[ImageGrid]) -> RopePositions:
    """Positions of a prompt whose placeholders are already expanded.

    Args:
        ids: token ids [n].
        image: id of the image placeholder.
        grids: of the images, in the order in which they appear.

    Raises:
        ValueError: placeholders and grids do not fit.
    """
    seen = np.asarray(ids) == image
    if seen.sum() != sum(grid.tokens for grid in grids):
        raise ValueError(f"{seen.sum()} image tokens stand in the prompt, and the images are {list(grids)}")
    axes = np.empty((3, len(ids)), np.float32)
    place = cursor = 0

    def line(until: int) -> None:
        nonlocal place, cursor
        axes[:, place:until] = np.arange(cursor, cursor + until - place)
        place, cursor = until, cursor + until - place

    for grid in grids:
        line(place + int(seen[place:].argmax()))
        block = slice(place, place + grid.tokens)
        if not seen[block].all():
            raise ValueError(f"fewer image tokens in a row than {grid} has")
        axes[0, block] = cursor
        axes[1, block] = cursor + np.repeat(np.arange(grid.height), grid.width)
        axes[2, block] = cursor + np.tile(np.arange(grid.width), grid.height)
        place, cursor = block.stop, cursor + max(grid.height, grid.width)
    line(len(ids))
    return RopePositions(axes, float(cursor - len(ids)))
