"""What the talker is asked, and the frame around it in which upstream's chat template puts it. No heavy imports."""

from dataclasses import dataclass
from typing import Final

from omni_ray.engine.reference_voice import SpokenTurn

SAMPLE_RATE: Final = 24_000
"""Hz, of the codec."""

AUDIO_BEGIN: Final = "<|audio_out_bos|>"
AUDIO_END: Final = "<|audio_eos|>"
TURN_END: Final = "<|eot_id|>"

SYSTEM: Final = (
    "<|start_header_id|>system<|end_header_id|>\n\nGenerate audio following instruction.\n\n"
    f"<|scene_desc_start|>\nAudio is recorded from a quiet room.\n<|scene_desc_end|>{TURN_END}"
)
"""The system turn of Boson's own examples."""
USER: Final = "<|start_header_id|>user<|end_header_id|>"
"""Before two line feeds and what the client wrote."""
ASSISTANT: Final = f"{TURN_END}<|start_header_id|>assistant<|end_header_id|>\n\n{AUDIO_BEGIN}"
"""Behind what the client wrote; sound follows."""


@dataclass(frozen=True, slots=True)
class HiggsPrompt:
    """``text`` to speak, in the voice of ``before`` if there is one."""

    text: str
    before: SpokenTurn | None = None
