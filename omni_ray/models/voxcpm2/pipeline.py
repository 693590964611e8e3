"""Declaration of ``voxcpm2``: one talker, which is the generator of the package ``voxcpm``.

The package wants torchaudio, librosa and more, which nothing else here does: give the stage a Ray runtime environment
of its own (``deploy_configs/voxcpm2.yaml``).
"""

from typing import Final

from omni_ray.config.pipeline import Edge, PipelineConfig, StageExecutionType, StageLimits, StagePipelineConfig
from omni_ray.config.sampling import SamplingParams

_FAMILY: Final = "omni_ray.models.voxcpm2"

PIPELINE = PipelineConfig(
    name="voxcpm2",
    description="VoxCPM2: text in, streamed speech out at 48 kHz, in the voice of a recording if one is given",
    stages=(
        StagePipelineConfig(
            name="talker",
            execution_type=StageExecutionType.LLM_AR,
            model_arch="VoxCPM2",
            engine="generator",
            engine_options=f"{_FAMILY}.options:VoxOptions",
            inputs=(Edge(source="request", parts=("speech_text",), processor=f"{_FAMILY}.processors:text_of_request"),),
            final_output_type="audio",
            engine_output_type="audio",
            owns_tokenizer=True,
            # upstream's default; max_tokens counts patches, of 160 ms in the published model
            sampling=SamplingParams(max_tokens=2000),
            limits=StageLimits(
                max_num_seqs=1, reason="its caches and its codec's state lie on the model; add replicas"
            ),
        ),
    ),
    checkpoint_basenames=("VoxCPM2",),
    checkpoints={"tiny": f"{_FAMILY}.checkpoint:make_tiny"},
    untried="its package is installed for its replicas alone; tests/models/voxcpm2 runs it where that is at hand",
    # a diffusion: the seed alone decides, there is no temperature
    sampled_outputs=(),
    max_audio_seconds=300,
)
