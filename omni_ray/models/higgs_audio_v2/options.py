"""Engine options and extra request fields of ``higgs_audio_v2``. No heavy imports: deploy YAMLs are checked with it."""

from pydantic import Field

from omni_ray.engine.options import CodecLMOptions, FrameCodecOptions
from omni_ray.engine.reference_voice import REFERENCE_FIELDS
from omni_ray.registry import ModelExtras

EXTRAS = ModelExtras(fields=REFERENCE_FIELDS)


class HiggsTalkerOptions(CodecLMOptions):
    """Options of ``HiggsTalker``: the engine's, for 25 frames a second instead of 12.5.

    Attributes:
        codec: directory or hub id of the codec's checkpoint, whose encoder hears recordings; None takes the one that
            the talker's checkpoint names.
    """

    base_frames: int = Field(default=100, ge=1)
    frames_per_unit: int = Field(default=30, ge=1)
    codec: str | None = Field(default=None, min_length=1)


class HiggsCodecOptions(FrameCodecOptions):
    """Options of ``HiggsCode2Wav``.

    Attributes:
        codec: as ``HiggsTalkerOptions.codec``.
    """

    codec: str | None = Field(default=None, min_length=1)
