"""Declaration of ``any_thinker``: one thinker, for checkpoints that no other pipeline is made for.

Which media it takes is read from the checkpoint's config: pictures where it has a ``vision_config``, sound where it
has an ``audio_config``.
"""

from collections.abc import Mapping
from itertools import combinations
from typing import Any, Final

from omni_ray.config.pipeline import Edge, PipelineConfig, RequestPart, StageExecutionType, StagePipelineConfig

_FAMILY: Final = "omni_ray.models.any_thinker"
_TOWERS: Final[tuple[tuple[str, RequestPart], ...]] = (
    ("audio_config", "input_audio"),
    ("vision_config", "input_image"),
)


def resolve(hf_config: Mapping[str, Any]) -> PipelineConfig:
    """The pipeline of a checkpoint.

    Args:
        hf_config: its ``config.json``; empty stands for a model of text alone.
    """
    media = [part for tower, part in _TOWERS if isinstance(hf_config.get(tower), Mapping)]
    takes = [kinds for count in range(len(media) + 1) for kinds in combinations(media, count)]
    return PipelineConfig(
        name="any_thinker",
        description="any text or vision-language model that transformers or vLLM can compute: a chat in, text out",
        stages=(
            StagePipelineConfig(
                name="thinker",
                execution_type=StageExecutionType.LLM_AR,
                model_arch="AnyThinker",
                inputs=tuple(
                    Edge(source="request", parts=("messages", *kinds), processor=f"{_FAMILY}.processors:prompt_of_chat")
                    for kinds in takes
                ),
                final_output_type="text",
                owns_tokenizer=True,
                engine_choices=("vllm",),
                engine_archs={"vllm": "AnyThinkerVLLM"},
                engine_options=f"{_FAMILY}.options:AnyThinkerOptions",
            ),
        ),
        fallback=f"{_FAMILY}.fallback:serves",
        checkpoints={"tiny": f"{_FAMILY}.checkpoint:make_tiny"},
    )
