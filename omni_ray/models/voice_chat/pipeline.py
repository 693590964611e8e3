"""Declaration of ``voice_chat``: listener -> thinker -> talker -> code2wav, real weights from pip packages, on CPU."""

from omni_ray.config.pipeline import Edge, PipelineConfig, StageExecutionType, StagePipelineConfig, Voices
from omni_ray.config.sampling import SamplingParams

_PROCESSORS = "omni_ray.models.voice_chat.processors"
_OPTIONS = "omni_ray.models.voice_chat.options"
_OPENAI_VOICES = (
    "alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse",
)  # fmt: skip

PIPELINE = PipelineConfig(
    name="voice_chat",
    description="speech or text in, text and streamed speech out: Whisper tiny.en, SmolLM2-135M-Instruct, hibari",
    stages=(
        StagePipelineConfig(
            name="listener",
            execution_type=StageExecutionType.LLM_AR,
            model_arch="WhisperListener",
            engine="per_request",
            engine_options=f"{_OPTIONS}:ListenerOptions",
            inputs=(Edge(source="request", parts=("input_audio",), processor=f"{_PROCESSORS}:clips_of_request"),),
            final_output_type="transcript",
            engine_output_type="transcript",
        ),
        StagePipelineConfig(
            name="thinker",
            execution_type=StageExecutionType.LLM_AR,
            model_arch="SmolLM2Thinker",
            inputs=(
                Edge(
                    source="listener",
                    parts=("messages",),
                    processor=f"{_PROCESSORS}:prompt_of_transcript",
                    takes="transcript",
                ),
                Edge(source="request", parts=("messages",), processor=f"{_PROCESSORS}:prompt_of_chat"),
            ),
            final_output_type="text",
            owns_tokenizer=True,
            engine_choices=("vllm",),
            engine_archs={"vllm": "SmolLM2ThinkerVLLM"},
            sampling=SamplingParams(temperature=0, max_tokens=256, repetition_penalty=1.1),
        ),
        StagePipelineConfig(
            name="talker",
            execution_type=StageExecutionType.LLM_AR,
            model_arch="HibariTalker",
            engine="per_request",
            engine_options=f"{_OPTIONS}:TalkerOptions",
            inputs=(
                Edge(source="thinker", processor=f"{_PROCESSORS}:clauses_of_thinker", takes="text"),
                Edge(source="request", parts=("speech_text",), processor=f"{_PROCESSORS}:clauses_of_speech"),
            ),
            engine_output_type="latent",
        ),
        StagePipelineConfig(
            name="code2wav",
            execution_type=StageExecutionType.LLM_GENERATION,
            model_arch="HibariCodec",
            engine_options=f"{_OPTIONS}:Code2WavOptions",
            inputs=(Edge(source="talker", processor=f"{_PROCESSORS}:latents_of_talker", carries_refs=True),),
            final_output_type="audio",
            engine_output_type="audio",
        ),
    ),
    prepare="omni_ray.models.voice_chat.checkpoint:prepare",
    voices=Voices(names=("heart",), default="heart", aliases=dict.fromkeys(_OPENAI_VOICES, "heart")),
    speech_speed=(0.25, 4.0),
    languages=("en",),
    input_audio_sample_rate=16000,
    max_input_audio_seconds=300,
    max_audio_seconds=300,
)
