"""Engine options of Qwen2.5-Omni's stages. No heavy imports: a deploy YAML is checked against them."""

from typing import Self

from pydantic import Field, model_validator

from omni_ray.engine.options import CodecLMOptions, CodecOptions


class TalkerOptions(CodecLMOptions):
    """Options of ``Qwen2_5OmniTalker``: at 50 codes a second the defaults are 4 s plus 1.2 s per token."""

    base_frames: int = Field(default=200, ge=1)
    frames_per_unit: int = Field(default=60, ge=1)


class Token2WavOptions(CodecOptions):
    """Options of ``Qwen2_5OmniToken2Wav``.

    Attributes:
        max_num_seqs: answers that are collected or decoded at once; one is computed at a time.
        num_steps: points in time of the diffusion, both ends included. Fewer are faster and not upstream's sound.
        stall_s: an answer is decoded whole, and nothing comes before it is.
    """

    max_num_seqs: int = Field(default=64, ge=1)
    num_steps: int = Field(default=10, ge=2, le=100)
    stall_s: float = Field(default=300.0, gt=0)

    @model_validator(mode="after")
    def _decodes_whole(self) -> Self:
        for name in ("chunk_frames", "chunk_growth", "left_context"):
            if name in self.model_fields_set:
                raise ValueError(f"{name} has no meaning here: token2wav decodes an answer whole")
        return self
