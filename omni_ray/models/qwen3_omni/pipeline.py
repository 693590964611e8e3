"""Declaration of ``qwen3_omni``: thinker -> talker -> code2wav, resolved from a checkpoint's config.

thinker     reads the chat (text, sound, images, videos) and writes the answer's tokens
talker      makes 12.5 code frames a second from those tokens, while the thinker still writes
code2wav    makes 1920 samples at 24 kHz of every frame

A checkpoint with ``enable_audio_output: false`` has the thinker alone.
"""

from collections.abc import Mapping
from itertools import combinations
from typing import Any, Final

from omni_ray.config.pipeline import (
    Edge,
    PipelineConfig,
    RequestPart,
    StageExecutionType,
    StagePipelineConfig,
    VideoSampling,
    Voices,
)
from omni_ray.config.sampling import SamplingParams

_FAMILY: Final = "omni_ray.models.qwen3_omni"
_MEDIA: Final[tuple[RequestPart, ...]] = ("input_audio", "input_image", "input_video")
_VIDEO: Final = VideoSampling(fps=2, least=4, most=768, multiple=2)
"""2 a second as Qwen's own examples take (no file of the checkpoint says it); the rest as transformers' class."""
_PUBLISHED_SPEAKERS: Final = ("chelsie", "ethan", "aiden")
_DEFAULT_SPEAKER: Final = "ethan"
_OPENAI_VOICES: Final = (
    "alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse",
)  # fmt: skip

THINKER: Final = StagePipelineConfig(
    name="thinker",
    execution_type=StageExecutionType.LLM_AR,
    model_arch="Qwen3OmniThinker",
    inputs=tuple(
        Edge(source="request", parts=("messages", *media), processor=f"{_FAMILY}.processors:prompt_of_chat")
        for count in range(len(_MEDIA) + 1)
        for media in combinations(_MEDIA, count)
    ),
    final_output_type="text",
    engine_output_type="token, and latent for media",
    owns_tokenizer=True,
    engine_choices=("vllm",),
    engine_archs={"vllm": "Qwen3OmniThinkerVLLM"},
    sampling=SamplingParams(temperature=0, max_tokens=2048),
)

TALKER: Final = StagePipelineConfig(
    name="talker",
    execution_type=StageExecutionType.LLM_AR,
    model_arch="Qwen3OmniTalker",
    # rows of hidden states for media may be megabytes; a text-only chat sends token ids alone
    inputs=(Edge(source="thinker", processor=f"{_FAMILY}.processors:talker_inputs", carries_refs=_MEDIA),),
    engine_output_type="code frame",
    engine_options=f"{_FAMILY}.options:TalkerOptions",
    # the checkpoint's own; the residual codebooks' (temperature 1, top_k 50, top_p 0.8) are upstream's constants
    sampling=SamplingParams(temperature=0.9, top_k=50, top_p=1.0, repetition_penalty=1.05, max_tokens=4096),
)

CODE2WAV: Final = StagePipelineConfig(
    name="code2wav",
    execution_type=StageExecutionType.LLM_GENERATION,
    model_arch="Qwen3OmniCode2Wav",
    inputs=(Edge(source="talker", processor=f"{_FAMILY}.processors:frames_of_talker"),),
    final_output_type="audio",
    engine_output_type="audio",
    engine_options=f"{_FAMILY}.options:Code2WavOptions",
)


def resolve(hf_config: Mapping[str, Any]) -> PipelineConfig:
    """The pipeline of a checkpoint.

    Args:
        hf_config: its ``config.json``; empty stands for Qwen3-Omni-30B-A3B-Instruct.
    """
    speaks = hf_config.get("enable_audio_output", True)
    return PipelineConfig(
        name="qwen3_omni",
        description=(
            "Qwen3-Omni: text, speech, images and videos in, text and streamed speech out"
            if speaks
            else "Qwen3-Omni without its talker: text, speech, images and videos in, text out"
        ),
        stages=(THINKER, TALKER, CODE2WAV) if speaks else (THINKER,),
        hf_architectures=("Qwen3OmniMoeForConditionalGeneration",),
        checkpoints={"tiny": f"{_FAMILY}.checkpoint:make_tiny", "dummy": f"{_FAMILY}.checkpoint:make_dummy"},
        voices=_voices(hf_config.get("talker_config", {})) if speaks else Voices(),
        input_audio_sample_rate=16_000,
        input_video=_VIDEO,
        max_audio_seconds=300,
    )


def _voices(talker_config: Mapping[str, Any]) -> Voices:
    """The checkpoint's speakers. OpenAI's names, which clients send by default, all mean the default speaker."""
    names = tuple(talker_config.get("speaker_id") or _PUBLISHED_SPEAKERS)
    default = _DEFAULT_SPEAKER if _DEFAULT_SPEAKER in names else names[0]
    known = {name.casefold() for name in names}
    return Voices(names=names, default=default, aliases={n: default for n in _OPENAI_VOICES if n not in known})
