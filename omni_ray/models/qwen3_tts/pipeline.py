"""Declaration of ``qwen3_tts``: one talker, which is the model of the package ``qwen-tts``.

The package pins transformers 4.57.3, which is not ours: the stage has a Ray runtime environment of its own
(``deploy_configs/qwen3_tts.yaml``), and only there is the package imported. It gives a text's sound in one piece.
"""

from collections.abc import Mapping
from typing import Any, Final

from omni_ray.config.pipeline import Edge, PipelineConfig, StageExecutionType, StageLimits, StagePipelineConfig, Voices
from omni_ray.config.sampling import SamplingParams

_FAMILY: Final = "omni_ray.models.qwen3_tts"
_PUBLISHED_SPEAKERS: Final = (
    "serena", "vivian", "uncle_fu", "ryan", "aiden", "ono_anna", "sohee", "eric", "dylan",
)  # fmt: skip
_OPENAI_VOICES: Final = (
    "alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse",
)  # fmt: skip

TALKER: Final = StagePipelineConfig(
    name="talker",
    execution_type=StageExecutionType.LLM_AR,
    model_arch="Qwen3TTS",
    engine="generator",
    engine_options=f"{_FAMILY}.options:QwenTTSOptions",
    inputs=(Edge(source="request", parts=("speech_text",), processor=f"{_FAMILY}.processors:text_of_request"),),
    final_output_type="audio",
    engine_output_type="audio",
    owns_tokenizer=True,
    # upstream's defaults, of the first codebook; max_tokens counts frames of 80 ms
    sampling=SamplingParams(temperature=0.9, top_k=50, top_p=1.0, repetition_penalty=1.05, max_tokens=2048),
    limits=StageLimits(max_num_seqs=1, reason="one answer at a time draws from torch's random state; add replicas"),
)


def resolve(hf_config: Mapping[str, Any]) -> PipelineConfig:
    """The pipeline of a checkpoint.

    Args:
        hf_config: its ``config.json``, which names the speakers; empty stands for the published CustomVoice models.
    """
    names = tuple((hf_config.get("talker_config") or {}).get("spk_id") or _PUBLISHED_SPEAKERS)
    default = "vivian" if "vivian" in names else names[0]
    return PipelineConfig(
        name="qwen3_tts",
        description="Qwen3-TTS: text in, speech out at 24 kHz, in one piece, with the checkpoint's voices",
        stages=(TALKER,),
        hf_architectures=("Qwen3TTSForConditionalGeneration",),
        hf_model_types=("qwen3_tts",),
        checkpoints={"tiny": f"{_FAMILY}.checkpoint:make_tiny"},
        untried="its package wants another transformers than ours; tests/models/qwen3_tts runs it where it is at hand",
        voices=Voices(names=names, default=default, aliases={n: default for n in _OPENAI_VOICES if n not in names}),
        sampled_outputs=("audio",),
        max_audio_seconds=160,
    )
