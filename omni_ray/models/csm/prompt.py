"""What the talker is asked: a text, who says it, and perhaps a turn before it with its sound. No heavy imports.

As upstream's processor writes a conversation: each turn is ``<|begin_of_text|>[speaker]text<|end_of_text|>``, and a
turn whose sound is known goes on with one ``<|AUDIO|>`` per code frame and ``<|audio_eos|>``.
"""

from dataclasses import dataclass
from typing import Final

from omni_ray.engine.reference_voice import SpokenTurn

SAMPLE_RATE: Final = 24_000
"""Hz, of Mimi."""

DEFAULT_SPEAKER: Final = "0"

BEGIN: Final = "<|begin_of_text|>"
END: Final = "<|end_of_text|>"
AUDIO: Final = "<|AUDIO|>"
AUDIO_END: Final = "<|audio_eos|>"


@dataclass(frozen=True, slots=True)
class CsmPrompt:
    """``text`` to speak as ``speaker`` (digits), who also said ``before``."""

    text: str
    speaker: str
    before: SpokenTurn | None = None
