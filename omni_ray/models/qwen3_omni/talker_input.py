"""What the talker is fed: one prompt, then the thinker's tokens as they become final. numpy only.

The contract of whoever makes these (the processor of the edge from the thinker):

1. First a ``TalkerPrompt``, as soon as the thinker's prompt is known; it holds no generated token. The talker computes
   all of its prompt but the last row from it, without waiting for text.
2. Then ``TalkerText`` with every generated token that is to be spoken, in order, from the first one on, a few at a time
   as they arrive; each token exactly once. The first one completes the talker's prompt; frame k needs tokens 1 .. k+1.
3. Then the iterator ends: that alone says that the text is over, and the talker hears ``tts_eos`` next. A token that is
   late is waited for; nothing is padded before the end.

**Lag one.** The last token that the thinker generated is never spoken, as upstream: neither the stop token (which is in
no ``TextChunk``) nor the ``max_tokens``-th one, which upstream's thinker never computes. Whoever knows the limit knows
of each token at once whether it is final; who does not must hold the newest one back until another has come.

An answer without a spoken token (a stop token at once, or ``max_tokens`` 1) is a prompt and no text: the talker makes
no frame and finishes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from omni_ray.models.qwen3_omni.positions import Grid


@dataclass(frozen=True, slots=True)
class TalkerPrompt:
    """The thinker's prompt, as far as the talker needs it.

    Attributes:
        prompt_ids: the thinker's prompt, placeholders expanded, all turns, up to and with the last
            ``<|im_start|>assistant`` and its newline. The talker keeps the user turns and that last line.
        speaker: as the client named it, in any case; None takes upstream's default (Ethan, else the first one).
        media_rows: float32 [m, thinker hidden]: input of the thinker's layer ``accept_hidden_layer`` at the audio,
            image and video placeholders of user turns, in order of position; None if there are none.
        grids: images and videos whose placeholders stand in user turns, in order of appearance.
    """

    prompt_ids: tuple[int, ...]
    speaker: str | None = None
    media_rows: NDArray[np.float32] | None = None
    grids: tuple[Grid, ...] = ()


@dataclass(frozen=True, slots=True)
class TalkerText:
    """Generated tokens that are final, at least one; thinker vocabulary."""

    token_ids: tuple[int, ...]
