"""Declaration of ``diffusion``: one stage that runs whichever pipeline class of diffusers the checkpoint names."""

from typing import Final

from omni_ray.config.pipeline import Edge, PipelineConfig, StageExecutionType, StagePipelineConfig

_FAMILY: Final = "omni_ray.models.diffusion"

PIPELINE = PipelineConfig(
    name="diffusion",
    description="Text in, pictures out: any text-to-image pipeline of diffusers, chosen by its model_index.json",
    stages=(
        StagePipelineConfig(
            name="painter",
            execution_type=StageExecutionType.DIFFUSION,
            model_arch="DiffusersTextToImage",
            inputs=(
                Edge(source="request", parts=("image_prompt",), processor=f"{_FAMILY}.processors:prompt_of_request"),
            ),
            final_output_type="image",
            engine_output_type="image",
            num_cpus=1,
        ),
    ),
    fallback=f"{_FAMILY}.fallback:serves",
    checkpoints={"tiny": f"{_FAMILY}.checkpoint:make_tiny"},
    sampled_outputs=("image",),
)
