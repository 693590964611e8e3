"""The declaration of qwen3_omni: what a checkpoint becomes, its voices, and what each request runs through."""

import json
from pathlib import Path
from typing import Any

import pytest

from omni_ray.config.pipeline import PipelineConfig
from omni_ray.models.qwen3_omni.checkpoint import PUBLISHED
from omni_ray.models.qwen3_omni.options import Code2WavOptions, TalkerOptions
from omni_ray.models.qwen3_omni.pipeline import resolve
from omni_ray.registry import engine_options, load_pipeline
from omni_ray.selection import select_for_checkpoint
from omni_ray.serve.api.voices import resolve_voice, voices_body
from omni_ray.serve.planner import all_plans, make_plan

PUBLISHED_CONFIG = json.loads(PUBLISHED.read_text())
SPEAKERS = ("chelsie", "ethan", "aiden")


def names(pipeline: PipelineConfig) -> list[str]:
    return [stage.name for stage in pipeline.topological()]


@pytest.mark.parametrize("config", [{}, PUBLISHED_CONFIG])
def test_the_published_pipeline(config: dict[str, Any]):
    pipeline = resolve(config)
    assert pipeline.problems() == []
    assert names(pipeline) == ["thinker", "talker", "code2wav"]
    assert pipeline.output_kinds() == ("text", "audio")
    assert (pipeline.voices.names, pipeline.voices.default) == (SPEAKERS, "ethan")
    assert engine_options(pipeline.stage("talker")) is TalkerOptions
    assert engine_options(pipeline.stage("code2wav")) is Code2WavOptions


def test_without_audio_output_the_thinker_is_alone():
    pipeline = resolve({**PUBLISHED_CONFIG, "enable_audio_output": False})
    assert names(pipeline) == ["thinker"]
    assert pipeline.output_kinds() == ("text",)
    assert pipeline.voices.names == ()
    assert all(plan.names() == ("thinker",) for plan in all_plans(pipeline))


def test_c46_voices_are_the_checkpoints_speakers():
    voices = resolve({"talker_config": {"speaker_id": {"zoe": 1, "Ethan II": 2}}}).voices
    assert (voices.names, voices.default) == (("zoe", "Ethan II"), "zoe")
    assert resolve_voice(voices, " ethan ii ", "voice") == "Ethan II"
    assert resolve_voice(voices, "alloy", "voice") == "zoe"
    assert voices_body(resolve({}).voices)["voices"] == list(SPEAKERS)
    marin = resolve({"talker_config": {"speaker_id": {"Marin": 1, "ethan": 2}}}).voices
    assert resolve_voice(marin, "marin", "voice") == "Marin", "a speaker's own name wins over OpenAI's alias"
    assert len(resolve({}).voices.aliases) == 13


def test_a_checkpoint_selects_it(tiny_checkpoint: Path, tmp_path: Path):
    selection = select_for_checkpoint(str(tiny_checkpoint))
    assert (selection.pipeline, selection.model) == ("qwen3_omni", str(tiny_checkpoint))
    assert load_pipeline("qwen3_omni", str(tiny_checkpoint)).voices.default == "ethan"
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "enable_audio_output": False}))
    assert names(load_pipeline("qwen3_omni", str(tmp_path))) == ["thinker"]
    assert names(load_pipeline("qwen3_omni", variant={"enable_audio_output": False})) == ["thinker"]


@pytest.mark.parametrize(
    "media", [(), ("input_audio",), ("input_image",), ("input_video",), ("input_audio", "input_video")]
)
def test_text_only_requests_never_start_the_talker(media: Any):
    pipeline = resolve({})
    parts = {"messages", *media}
    assert make_plan(pipeline, {"text"}, parts).names() == ("thinker",)
    spoken = make_plan(pipeline, {"text", "audio"}, parts)
    assert (spoken.names(), spoken.trunk, spoken.sampled) == (("thinker", "talker", "code2wav"), "code2wav", "thinker")
    (edge,) = spoken.stage("thinker").edges
    assert set(pipeline.stage("thinker").inputs[edge].parts) == parts
    assert [part.by_reference for part in spoken.stages] == [bool(media), False, False]
