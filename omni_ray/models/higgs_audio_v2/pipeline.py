"""Declaration of ``higgs_audio_v2``: talker -> code2wav.

talker      makes 25 rows of eight codes a second; codebook k lags k rows behind (the delay pattern)
code2wav    takes the lag out again, and decodes every frame to 960 samples at 24 kHz
"""

from typing import Final

from omni_ray.config.pipeline import Edge, PipelineConfig, StageExecutionType, StagePipelineConfig, Voices
from omni_ray.config.sampling import SamplingParams

_FAMILY: Final = "omni_ray.models.higgs_audio_v2"
_OPENAI_VOICES: Final = (
    "alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse",
)  # fmt: skip

PIPELINE = PipelineConfig(
    name="higgs_audio_v2",
    description="Higgs Audio v2: text in, streamed speech out at 24 kHz, in the voice of a recording if one is given",
    stages=(
        StagePipelineConfig(
            name="talker",
            execution_type=StageExecutionType.LLM_AR,
            model_arch="HiggsTalker",
            inputs=(
                Edge(source="request", parts=("speech_text",), processor=f"{_FAMILY}.processors:prompt_of_request"),
            ),
            engine_output_type="code frame",
            engine_options=f"{_FAMILY}.options:HiggsTalkerOptions",
            owns_tokenizer=True,
            # of Boson's own example; max_tokens counts rows of 40 ms
            sampling=SamplingParams(temperature=0.3, top_k=50, top_p=0.95, max_tokens=1500),
        ),
        StagePipelineConfig(
            name="code2wav",
            execution_type=StageExecutionType.LLM_GENERATION,
            model_arch="HiggsCode2Wav",
            inputs=(Edge(source="talker", processor=f"{_FAMILY}.processors:frames_of_talker"),),
            final_output_type="audio",
            engine_output_type="audio",
            engine_options=f"{_FAMILY}.options:HiggsCodecOptions",
        ),
    ),
    hf_architectures=("HiggsAudioV2ForConditionalGeneration",),
    hf_model_types=("higgs_audio_v2",),
    checkpoints={"tiny": f"{_FAMILY}.checkpoint:make_tiny"},
    # the model has no named voices: without a recording any voice may come
    voices=Voices(names=("default",), default="default", aliases=dict.fromkeys(_OPENAI_VOICES, "default")),
    sampled_outputs=("audio",),
    # 2048 positions, one a row, hold 82 s
    max_audio_seconds=60,
)
