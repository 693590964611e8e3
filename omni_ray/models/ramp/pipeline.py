"""Declaration of ``ramp``: thinker -> talker -> code2wav, computed by arithmetic, checked byte for byte.

A new model copies this folder: this file declares, ``processors.py`` joins stages, ``stages.py`` and ``code2wav.py``
compute, ``options.py`` names the engine options.
"""

from omni_ray.config.pipeline import Edge, PipelineConfig, StageExecutionType, StagePipelineConfig, Voices

VOICES = Voices(
    names=("a", "b", "c", "d", "e", "f", "g", "h"),
    default="a",
    aliases={
        "alloy": "a", "ash": "b", "ballad": "c", "cedar": "d", "coral": "e", "echo": "f", "fable": "g", "marin": "h",
        "nova": "a", "onyx": "b", "sage": "c", "shimmer": "d", "verse": "e",
    },
)  # fmt: skip

PIPELINE = PipelineConfig(
    name="ramp",
    description="test pipeline without weights: every sample of its speech tells whose it is and where it belongs",
    stages=(
        StagePipelineConfig(
            name="thinker",
            execution_type=StageExecutionType.LLM_AR,
            model_arch="RampThinker",
            engine="per_request",
            engine_options="omni_ray.models.ramp.options:ThinkerOptions",
            inputs=(
                Edge(source="request", parts=("messages",), processor="omni_ray.models.ramp.processors:words_of_chat"),
            ),
            final_output_type="text",
            engine_output_type="token and latent",
            owns_tokenizer=True,
        ),
        StagePipelineConfig(
            name="talker",
            execution_type=StageExecutionType.LLM_AR,
            model_arch="RampTalker",
            engine="per_request",
            engine_options="omni_ray.models.ramp.options:TalkerOptions",
            inputs=(
                Edge(source="thinker", processor="omni_ray.models.ramp.processors:rows_of_thinker", carries_refs=True),
                Edge(
                    source="request",
                    parts=("speech_text",),
                    processor="omni_ray.models.ramp.processors:rows_of_speech",
                ),
            ),
            engine_output_type="code frame",
        ),
        StagePipelineConfig(
            name="code2wav",
            execution_type=StageExecutionType.LLM_GENERATION,
            model_arch="RampCode2Wav",
            engine_options="omni_ray.models.ramp.options:Code2WavOptions",
            inputs=(Edge(source="talker", processor="omni_ray.models.ramp.processors:frames_of_talker"),),
            final_output_type="audio",
            engine_output_type="audio",
        ),
    ),
    voices=VOICES,
)
