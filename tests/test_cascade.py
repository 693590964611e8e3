"""Cascades: parts of registered pipelines, joined by their own edges or by rewritten requests."""

import pytest

from omni_ray.config.pipeline import Edge
from omni_ray.errors import ConfigError
from omni_ray.registry import load_pipeline
from omni_ray.serve.planner import make_plan
from omni_ray.serve.resolve import AppArgs, resolve

VARIANT = {"listener": "voice_chat", "thinker": "voice_chat", "talker": "csm"}


def test_voice_chat_is_one_instance():
    """Its parts, joined again, are its stages: the same classes, engines and streaming processors."""
    home = load_pipeline("voice_chat")
    composed = load_pipeline("cascade")
    assert composed == load_pipeline("cascade", variant=dict.fromkeys(VARIANT, "voice_chat"))
    at_home = [stage.model_copy(update={"prepare": home.prepare}) for stage in home.topological()]
    assert list(composed.topological()) == at_home
    shared = ("voices", "speech_speed", "languages", "input_audio_sample_rate", "max_audio_seconds", "sampled_outputs")
    assert all(composed.model_dump()[key] == home.model_dump()[key] for key in shared)


def test_another_talker_is_asked_to_speak_the_whole_text():
    composed = load_pipeline("cascade", variant=VARIANT)
    assert [stage.name for stage in composed.topological()] == ["listener", "thinker", "talker", "code2wav"]
    talker, home = composed.stage("talker"), load_pipeline("csm").stage("talker")
    joint, alone = talker.inputs
    assert joint == Edge(source="thinker", processor=alone.processor, takes="text", rewrites="speech_text")
    assert (alone,) == home.inputs
    assert composed.voices == load_pipeline("csm").voices
    assert make_plan(composed, ("text", "audio"), ("messages", "input_audio")).names() == (
        "listener",
        "thinker",
        "talker",
        "code2wav",
    )
    assert make_plan(composed, ("audio",), ("speech_text",)).names() == ("talker", "code2wav")
    assert make_plan(composed, ("text",), ("messages",)).names() == ("thinker",)


def test_another_thinker_hears_by_its_written_chat():
    composed = load_pipeline("cascade", variant={**VARIANT, "thinker": "qwen3_omni"})
    joint, *others = composed.stage("thinker").inputs
    assert joint.source == "listener"
    assert (joint.takes, joint.rewrites, joint.parts) == ("transcript", "messages", ("messages",))
    assert not [edge for edge in others if "input_audio" in edge.parts]


def test_a_talker_with_its_own_edge_for_text_streams_behind_any_thinker():
    composed = load_pipeline("cascade", variant={"thinker": "qwen3_omni", "talker": "voice_chat"})
    (home,) = load_pipeline("voice_chat").stage("talker").stage_edges()
    assert composed.stage("talker").inputs[0] == home
    assert "input_audio" in {part for edge in composed.stage("thinker").inputs for part in edge.parts}


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ({"thinker": "voice_chat", "taker": "csm"}, r"unknown role 'taker'; did you mean 'talker'\?"),
        ({"talker": "csm"}, "a cascade needs a thinker"),
        ({"thinker": "csm"}, r"variant\.thinker: pipeline 'csm' has no stage of its own that answers"),
        ({"thinker": "voice_chat", "listener": "csm"}, r"variant\.listener: pipeline 'csm' has no stage .* that hears"),
        ({"thinker": "voice_chat", "talker": "qwen3_omni"}, r"variant\.talker: .*'qwen3_omni' has no stage .* speaks"),
        ({"thinker": "voicechat"}, r"variant\.thinker: unknown pipeline 'voicechat'; did you mean 'voice_chat'\?"),
        ({"thinker": "cascade"}, "'cascade' is no part of itself"),
        ({"thinker": 3}, r"variant\.thinker: must be a pipeline's name"),
    ],
)
def test_what_does_not_fit_is_named(variant: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        load_pipeline("cascade", variant=variant)


def test_an_edge_that_takes_another_kind_is_refused():
    """Type checked where it is declared, whoever declares it."""
    home = load_pipeline("voice_chat")
    talker = home.stage("talker")
    wrong = talker.model_copy(update={"inputs": (talker.inputs[0].model_copy(update={"takes": "transcript"}),)})
    stages = tuple(wrong if stage.name == "talker" else stage for stage in home.stages)
    (problem,) = home.model_copy(update={"stages": stages}).problems()
    assert problem.endswith("inputs[0]: takes transcript, but stage 'thinker' makes text")
    text = talker.inputs[0].model_copy(update={"rewrites": "messages"})
    stages = tuple(
        stage.model_copy(update={"inputs": (text,)}) if stage.name == "talker" else stage for stage in home.stages
    )
    (problem,) = home.model_copy(update={"stages": stages}).problems()
    assert problem.endswith("inputs[0].rewrites: messages are made from a transcript")


def test_each_stage_may_have_its_own_checkpoint(tmp_path):
    stages = {name: {"model": str(tmp_path / "csm")} for name in ("talker", "code2wav")}
    app = resolve("cascade", AppArgs(deploy_config={"variant": VARIANT, "stages": stages}))
    given = str(tmp_path / "csm")
    assert [spec.model for spec in app.stages] == [None, None, given, given]
    assert app.pipeline.stage("thinker").prepare == load_pipeline("voice_chat").prepare
    assert app.pipeline.stage("talker").prepare is None
