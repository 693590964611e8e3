"""What the talker is fed: the prompt's rows once, then a row for every token that is to be spoken. numpy only.

1. First a ``TalkerPrompt``; it holds no generated token.
2. Then ``TalkerRows`` for every generated token that is to be spoken, in order, as they come. Code k needs k rows.
3. Then the iterator ends: the talker hears the text's end once, then padding. A row that is late is waited for.

The last token that the thinker draws has no row (``latent_engine``), so it is never spoken, as upstream.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omni_ray.models.qwen2_5_omni.positions import ImageGrid


@dataclass(frozen=True, slots=True)
class TalkerPrompt:
    """The thinker's prompt as the talker hears it.

    Attributes:
        prompt_ids: n thinker ids, placeholders expanded.
        rows: float32 [n, thinker hidden].
        speaker: as the client named it, in any case; None takes the checkpoint's first.
        grids: images of the prompt, in order.
    """

    prompt_ids: tuple[int, ...]
    rows: NDArray[np.float32]
    speaker: str | None = None
    grids: tuple[ImageGrid, ...] = ()


@dataclass(frozen=True, slots=True)
class TalkerRows:
    """Rows of generated tokens, float32 [n, thinker hidden], at least one."""

    rows: NDArray[np.float32]
