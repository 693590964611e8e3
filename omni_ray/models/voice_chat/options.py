"""Engine options of voice_chat's listener and thinker. No heavy imports: a deploy YAML is checked against them."""

from typing import Literal

from pydantic import Field

from omni_ray.engine.options import AROptions, PerRequestOptions


class ListenerOptions(PerRequestOptions):
    """Options of ``WhisperListener``. ``threads`` clips are transcribed at once, each on ``cpu_threads`` cores.

    Attributes:
        compute_type: CTranslate2's arithmetic.
        cpu_threads: threads of one transcription.
        beam_size: 1 is greedy.
        context_s: window in seconds to which clips of at most ``context_s - 8`` are padded; longer ones are padded to
            30, what Whisper was trained with. 15 instead of 30 takes 0.18 s instead of 0.42 for a short question; on 96
            clips of synthetic speech, half of them noisy, both made the same 7 errors in 726 words, and one of ten
            differed in punctuation or in how a number is written. Below 15 Whisper repeats itself.
    """

    compute_type: Literal["int8", "float32"] = "int8"
    cpu_threads: int = Field(default=2, ge=1)
    beam_size: int = Field(default=1, ge=1)
    context_s: int = Field(default=15, ge=15, le=30)


class ThinkerOptions(AROptions):
    """Options of ``SmolLM2Thinker``: those of the AR engine."""
