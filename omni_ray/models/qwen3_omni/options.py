"""Engine options of Qwen3-Omni's stages. No heavy imports: a deploy YAML is checked against them."""

from typing import Final, Literal, Self

from pydantic import model_validator

from omni_ray.engine.options import CodecLMOptions, FrameCodecOptions

UPSTREAM_LEFT_CONTEXT: Final = 25
"""Frames that upstream decodes again before each chunk."""


class TalkerOptions(CodecLMOptions):
    """Options of ``Qwen3OmniTalker``.

    Attributes:
        kv_cache_dtype: ``auto`` keeps keys and values as they are computed. ``fp8`` keeps them in 8 bits (see
            ``engine.kv_table``): half the memory and the bandwidth, and other codes than without it. Named as vLLM's.
    """

    kv_cache_dtype: Literal["auto", "fp8"] = "auto"


class Code2WavOptions(FrameCodecOptions):
    """Options of ``Qwen3OmniCode2Wav``.

    Attributes:
        context: ``stateful`` carries the past, so the stream equals one call. ``truncated`` decodes upstream's windows:
            an approximation, for comparison.
        left_context: frames decoded again, for ``truncated`` only; None takes upstream's 25.
        dtype: of weights and arithmetic; the promises about equality are for float32. ``tf32`` is float32 whose
            products a GPU may round to 10 bits (a CPU does not).
    """

    context: Literal["stateful", "truncated"] = "stateful"
    dtype: Literal["float32", "tf32", "bfloat16"] = "float32"

    @model_validator(mode="after")
    def _left_context_has_a_meaning(self) -> Self:
        if self.left_context is not None and self.context == "stateful":
            raise ValueError("left_context has no meaning with context: stateful, which decodes nothing again")
        if self.left_context is not None and self.left_context < UPSTREAM_LEFT_CONTEXT:
            raise ValueError(f"left_context: {self.left_context} is below upstream's {UPSTREAM_LEFT_CONTEXT}")
        return self

    def truncated_left(self) -> int:
        """Frames of left context of ``truncated``."""
        return UPSTREAM_LEFT_CONTEXT if self.left_context is None else self.left_context
