"""Engine options and extra request fields of ``voxcpm2``. No heavy imports: a deploy YAML is checked against them."""

from pydantic import Field

from omni_ray.engine.options import GeneratorOptions
from omni_ray.engine.reference_voice import REFERENCE_FIELDS
from omni_ray.registry import ModelExtras

EXTRAS = ModelExtras(fields=REFERENCE_FIELDS)


class VoxOptions(GeneratorOptions):
    """Options of ``VoxCPM2``; names and defaults of the last two are upstream's.

    Attributes:
        device: ``cpu`` or ``cuda``.
        threads: torch threads on CPU.
        optimize: compile its steps, on CUDA only; the start takes minutes longer.
        inference_timesteps: diffusion steps per patch.
        cfg_value: strength of classifier-free guidance.
    """

    device: str = Field(default="cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    threads: int = Field(default=1, ge=1)
    optimize: bool = False
    inference_timesteps: int = Field(default=10, ge=1, le=100)
    cfg_value: float = Field(default=2.0, ge=1, le=10)
