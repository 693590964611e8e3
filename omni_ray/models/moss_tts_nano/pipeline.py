"""Declaration of ``moss_tts_nano``: one talker that holds the language model and its codec.

The checkpoint brings its own Python code (``trust_remote_code``) with an ``inference_stream()`` generator, which the
generator engine runs as it is.
"""

from typing import Final

from omni_ray.config.pipeline import Edge, PipelineConfig, StageExecutionType, StageLimits, StagePipelineConfig
from omni_ray.config.sampling import SamplingParams

_FAMILY: Final = "omni_ray.models.moss_tts_nano"

PIPELINE = PipelineConfig(
    name="moss_tts_nano",
    description="MOSS-TTS-Nano: text in, streamed speech out at 48 kHz, in the voice of a recording if one is given",
    stages=(
        StagePipelineConfig(
            name="talker",
            execution_type=StageExecutionType.LLM_AR,
            model_arch="MossTTSNano",
            engine="generator",
            engine_options=f"{_FAMILY}.options:MossOptions",
            inputs=(Edge(source="request", parts=("speech_text",), processor=f"{_FAMILY}.processors:text_of_request"),),
            final_output_type="audio",
            engine_output_type="audio",
            owns_tokenizer=True,
            # upstream's defaults; max_tokens counts frames of 80 ms
            sampling=SamplingParams(temperature=0.8, top_k=25, top_p=0.95, repetition_penalty=1.2, max_tokens=375),
            limits=StageLimits(max_num_seqs=1, reason="its generators share one codec's state; add replicas instead"),
        ),
    ),
    hf_architectures=("MossTTSNanoForCausalLM",),
    hf_model_types=("moss_tts_nano",),
    checkpoint_basenames=("MOSS-TTS-Nano",),
    checkpoints={"tiny": f"{_FAMILY}.checkpoint:make_tiny"},
    sampled_outputs=("audio",),
    max_audio_seconds=300,
)
