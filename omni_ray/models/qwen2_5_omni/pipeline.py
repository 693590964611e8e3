"""Declaration of ``qwen2_5_omni``: thinker -> talker -> token2wav, resolved from a checkpoint's config.

thinker     reads the chat (text, sound, images) and writes the answer; beside each token it gives what it thought
talker      makes 50 codes a second from those thoughts, while the thinker still writes
token2wav   makes 480 samples at 24 kHz of every code, of all of them at once: it begins when the talker ends

From the text's end until then nothing comes; a deploy config whose hardware needs more than a minute for it raises
``streaming.idle_timeout_s`` and the ingress's ``idle_timeout_s.audio``.

A checkpoint with ``enable_audio_output: false`` has the thinker alone. No system prompt is inserted; Qwen's own speech
needs theirs ("You are Qwen, a virtual human developed by the Qwen Team, ..."), which clients send.
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
    Voices,
)
from omni_ray.config.sampling import SamplingParams

_FAMILY: Final = "omni_ray.models.qwen2_5_omni"
_MEDIA: Final[tuple[RequestPart, ...]] = ("input_audio", "input_image")
_SPEAKERS: Final = ("Chelsie", "Ethan")
"""Of the published ``spk_dict.pt``, which no config lists; the first one is upstream's default."""
_OPENAI_VOICES: Final = (
    "alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse",
)  # fmt: skip

THINKER: Final = StagePipelineConfig(
    name="thinker",
    execution_type=StageExecutionType.LLM_AR,
    model_arch="Qwen2_5OmniThinker",
    inputs=tuple(
        Edge(source="request", parts=("messages", *media), processor=f"{_FAMILY}.processors:prompt_of_chat")
        for count in range(len(_MEDIA) + 1)
        for media in combinations(_MEDIA, count)
    ),
    final_output_type="text",
    engine_output_type="token and latent",
    engine="latent_text",
    owns_tokenizer=True,
    sampling=SamplingParams(temperature=0, max_tokens=2048),
)

TALKER: Final = StagePipelineConfig(
    name="talker",
    execution_type=StageExecutionType.LLM_AR,
    model_arch="Qwen2_5OmniTalker",
    # a row per position, 14 kB as published: a prompt's rows are megabytes
    inputs=(Edge(source="thinker", processor=f"{_FAMILY}.processors:talker_inputs", carries_refs=True),),
    engine_output_type="code frame",
    engine_options=f"{_FAMILY}.options:TalkerOptions",
    # defaults of upstream's generate
    sampling=SamplingParams(temperature=0.9, top_k=40, top_p=0.8, repetition_penalty=1.05, max_tokens=4096),
)

TOKEN2WAV: Final = StagePipelineConfig(
    name="token2wav",
    execution_type=StageExecutionType.LLM_GENERATION,
    model_arch="Qwen2_5OmniToken2Wav",
    inputs=(Edge(source="talker", processor=f"{_FAMILY}.processors:codes_of_talker"),),
    final_output_type="audio",
    engine_output_type="audio",
    engine_options=f"{_FAMILY}.options:Token2WavOptions",
)


def resolve(hf_config: Mapping[str, Any]) -> PipelineConfig:
    """The pipeline of a checkpoint.

    Args:
        hf_config: its ``config.json``; empty stands for Qwen2.5-Omni-7B.
    """
    speaks = hf_config.get("enable_audio_output", True)
    return PipelineConfig(
        name="qwen2_5_omni",
        description=(
            "Qwen2.5-Omni: text, speech and images in, text and speech out"
            if speaks
            else "Qwen2.5-Omni without its talker: text, speech and images in, text out"
        ),
        stages=(THINKER, TALKER, TOKEN2WAV) if speaks else (THINKER,),
        hf_architectures=("Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration"),
        hf_model_types=("qwen2_5_omni",),
        checkpoints={"tiny": f"{_FAMILY}.checkpoint:make_tiny"},
        voices=Voices(names=_SPEAKERS, default=_SPEAKERS[0], aliases=dict.fromkeys(_OPENAI_VOICES, _SPEAKERS[0]))
        if speaks
        else Voices(),
        input_audio_sample_rate=16_000,
        max_input_audio_seconds=300,
        # 4096 codes, upstream's limit, are 82 s
        max_audio_seconds=80,
    )
