"""Declaration of ``tone_tts``: one stage, text to tones."""

from omni_ray.config.pipeline import Edge, PipelineConfig, StageExecutionType, StagePipelineConfig, Voices

PIPELINE = PipelineConfig(
    name="tone_tts",
    description="example of an out-of-tree model: every letter of the text becomes a tone",
    stages=(
        StagePipelineConfig(
            name="talker",
            execution_type=StageExecutionType.LLM_AR,
            model_arch="ToneTalker",
            engine="per_request",
            inputs=(
                Edge(source="request", parts=("speech_text",), processor="tone_tts.processors:letters_of_request"),
            ),
            final_output_type="audio",
            engine_output_type="audio",
        ),
    ),
    voices=Voices(names=("sine",), default="sine"),
)
