"""Engine options of voice_chat's stages. No heavy imports: a deploy YAML is checked against them."""

from typing import Literal

from pydantic import Field, PositiveInt

from omni_ray.engine.options import CodecOptions, PerRequestOptions


class ListenerOptions(PerRequestOptions):
    """Options of ``WhisperListener``. ``threads`` clips are transcribed at once, each on ``cpu_threads`` cores.

    Attributes:
        compute_type: CTranslate2's arithmetic.
        cpu_threads: threads of one transcription.
        beam_size: 1 is greedy.
        context_s: window in seconds to which clips of at most ``context_s - 8`` are padded; longer ones are padded to
            30, what Whisper was trained with. 15 instead of 30 took 0.18 s instead of 0.42 per clip, with equally many
            wrong words (7 of 726) on 96 clips of synthetic speech up to 7 s long, a third of them noisy; about one
            transcript of ten differs, mostly in punctuation or numbers. Not tried on recorded speech: 30 is the
            cautious choice. Below 15 Whisper repeats itself.
    """

    compute_type: Literal["int8", "float32"] = "int8"
    cpu_threads: int = Field(default=2, ge=1)
    beam_size: int = Field(default=1, ge=1)
    context_s: int = Field(default=15, ge=15, le=30)


class TalkerOptions(PerRequestOptions):
    """Options of ``HibariTalker``: one thread makes speech a hundred times faster than it is heard."""


class Code2WavOptions(CodecOptions):
    """Options of ``HibariCodec``. Its rows last 12.5 ms, so chunks grow from 0.2 s to 1 s."""

    chunk_frames: tuple[PositiveInt, ...] = Field(default=(16, 32, 64, 80), min_length=1)
