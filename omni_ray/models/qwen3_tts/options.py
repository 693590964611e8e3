"""Engine options of ``qwen3_tts``. No heavy imports: a deploy YAML is checked against them."""

from typing import Literal

from pydantic import Field

from omni_ray.engine.options import GeneratorOptions


class QwenTTSOptions(GeneratorOptions):
    """Options of ``Qwen3TTS``.

    Attributes:
        stall_s: as every engine's; here a step is a whole answer.
        device: torch's name, ``cpu`` or ``cuda``.
        dtype: of the language model and the codec.
        threads: torch threads on CPU.
    """

    stall_s: float = Field(default=300.0, gt=0)
    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = Field(default=1, ge=1)
