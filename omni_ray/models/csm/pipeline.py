"""Declaration of ``csm``: talker -> code2wav.

talker      makes 12.5 code frames a second from the text: a backbone step and a depth decoder's steps for each
code2wav    Mimi's decoder: 1920 samples at 24 kHz of every frame
"""

from typing import Final

from omni_ray.config.pipeline import Edge, PipelineConfig, StageExecutionType, StagePipelineConfig, Voices
from omni_ray.config.sampling import SamplingParams

_FAMILY: Final = "omni_ray.models.csm"
_OPENAI_VOICES: Final = (
    "alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse",
)  # fmt: skip

PIPELINE = PipelineConfig(
    name="csm",
    description="Sesame CSM: text in, streamed speech out at 24 kHz, in the voice of a recording if one is given",
    stages=(
        StagePipelineConfig(
            name="talker",
            execution_type=StageExecutionType.LLM_AR,
            model_arch="CsmTalker",
            inputs=(
                Edge(source="request", parts=("speech_text",), processor=f"{_FAMILY}.processors:prompt_of_request"),
            ),
            engine_output_type="code frame",
            engine_options="omni_ray.engine.options:CodecLMOptions",
            owns_tokenizer=True,
            # of Sesame's own generator, for all codebooks; max_tokens counts frames of 80 ms
            sampling=SamplingParams(temperature=0.9, top_k=50, top_p=1.0, max_tokens=1125),
        ),
        StagePipelineConfig(
            name="code2wav",
            execution_type=StageExecutionType.LLM_GENERATION,
            model_arch="CsmCode2Wav",
            inputs=(Edge(source="talker", processor=f"{_FAMILY}.processors:frames_of_talker"),),
            final_output_type="audio",
            engine_output_type="audio",
            engine_options="omni_ray.engine.options:FrameCodecOptions",
        ),
    ),
    hf_architectures=("CsmForConditionalGeneration",),
    checkpoints={"tiny": f"{_FAMILY}.checkpoint:make_tiny"},
    # speaker numbers, which tell the turns of a conversation apart: without a recording any voice may come
    voices=Voices(names=tuple("0123456789"), default="0", aliases=dict.fromkeys(_OPENAI_VOICES, "0")),
    sampled_outputs=("audio",),
    # 2048 positions, one a frame, hold 163 s
    max_audio_seconds=90,
)
