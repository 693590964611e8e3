"""Engine options and extra request fields of ``moss_tts_nano``."""

from typing import Literal

from pydantic import Field

from omni_ray.engine.options import GeneratorOptions
from omni_ray.engine.reference_voice import REFERENCE_FIELDS
from omni_ray.registry import ModelExtras

EXTRAS = ModelExtras(fields=REFERENCE_FIELDS)


class MossOptions(GeneratorOptions):
    """Options of ``MossTTSNano``.

    Attributes:
        audio_tokenizer: directory or hub id of the codec; None takes what the checkpoint's config names.
        device: torch's name, ``cpu`` or ``cuda``.
        dtype: of the language model; the codec computes in float32, as upstream's does.
        threads: torch threads on CPU.
    """

    audio_tokenizer: str | None = None
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    threads: int = Field(default=1, ge=1)
