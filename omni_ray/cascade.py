"""Cascades: a listener, a thinker and a talker of different pipelines composed to one, as a deploy config names them.

    pipeline: cascade
    variant: {listener: voice_chat, thinker: voice_chat, talker: csm}
    stages:
      talker: {model: DIR_OR_HUB_ID}
      code2wav: {model: DIR_OR_HUB_ID}

Each part is taken from the pipeline that is named. Where it has an edge that reads nothing but the kind of output that
the part before it makes (``Edge.takes``), that edge joins them and streams as it does at home. Else the part is asked
as by a request (``Edge.rewrites``): a talker speaks the whole text, a thinker gets a chat of written messages. What
needs another model's inner values (Qwen3-Omni's talker) fits neither and is refused. Knows no model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from omni_ray.config.base import suggest
from omni_ray.config.pipeline import (
    REQUEST,
    Edge,
    OutputKind,
    PipelineConfig,
    RequestPart,
    StagePipelineConfig,
    Voices,
)
from omni_ray.errors import ConfigError
from omni_ray.registry import load_pipeline

NAME: Final = "cascade"
DEFAULT: Final = {"listener": "voice_chat", "thinker": "voice_chat", "talker": "voice_chat"}


@dataclass(frozen=True, slots=True)
class _Part:
    """One role: the pipeline it is taken from, and its stages in the order data flows."""

    pipeline: PipelineConfig
    stages: tuple[StagePipelineConfig, ...]


def resolve(variant: Mapping[str, Any]) -> PipelineConfig:
    """The pipeline of a choice ``{role: pipeline}``; ``thinker`` must be among the roles, or nothing at all.

    Raises:
        ConfigError: an unknown role or pipeline, or one that has no such part; all of them at once.
    """
    chosen = dict(variant) or DEFAULT
    problems = [f"variant: unknown role {role!r}; {suggest(role, DEFAULT)}" for role in chosen if role not in DEFAULT]
    if "thinker" not in chosen:
        problems.append("variant: a cascade needs a thinker: the name of a pipeline that answers in text")
    problems += [f"variant.{r}: must be a pipeline's name" for r, n in chosen.items() if not isinstance(n, str)]
    if problems:
        raise ConfigError(problems)
    parts: dict[str, _Part] = {}
    for role, name in chosen.items():
        try:
            if name == NAME:
                raise ConfigError([f"{NAME!r} is no part of itself"])
            parts[role] = _part(role, load_pipeline(name))
        except ConfigError as error:
            problems += [f"variant.{role}: {problem}" for problem in error.problems]
    if problems:
        raise ConfigError(problems)
    return _composed(parts)


def _part(role: str, pipeline: PipelineConfig) -> _Part:
    """The stages of ``pipeline`` that play ``role``."""
    order = pipeline.topological()
    if role == "listener":
        found = [s for s in order if s.final_output_type == "transcript" and s.request_edges()]
    elif role == "thinker":
        found = [s for s in order if s.final_output_type == "text" and _asked_with(s, "messages")]
    else:
        speakers = [s for s in order if _asked_with(s, "speech_text")]
        found = [*speakers[:1], *_after(order, speakers[0])] if speakers else []
        found = found if any(s.final_output_type == "audio" for s in found) else []
    if not found:
        what = {"listener": "that hears", "thinker": "that answers a chat of text", "talker": "that speaks a text"}
        raise ConfigError([f"pipeline {pipeline.name!r} has no stage of its own {what[role]}"])
    return _Part(pipeline, tuple(found if role == "talker" else found[:1]))


def _asked_with(stage: StagePipelineConfig, part: RequestPart) -> Edge | None:
    """The stage's request edge that reads this part alone."""
    return next((edge for edge in stage.request_edges() if edge.parts == (part,)), None)


def _after(order: tuple[StagePipelineConfig, ...], first: StagePipelineConfig) -> list[StagePipelineConfig]:
    """Stages that are fed, in the end, by ``first``."""
    reached = {first.name}
    after = []
    for stage in order:
        if stage.name not in reached and any(edge.source in reached for edge in stage.stage_edges()):
            reached.add(stage.name)
            after.append(stage)
    return after


def _composed(parts: Mapping[str, _Part]) -> PipelineConfig:
    thinker, talker, listener = parts["thinker"], parts.get("talker"), parts.get("listener")
    mind = thinker.stages[0]
    kept = tuple(e for e in mind.request_edges() if listener is None or "input_audio" not in e.parts)
    joint = () if listener is None else (_joint(mind, listener.stages[0], "transcript", "messages"),)
    stages = [] if listener is None else [_with_weights(listener, listener.stages[0], listener.stages[0].inputs)]
    stages.append(_with_weights(thinker, mind, (*joint, *kept)))
    if talker is not None:
        first, *others = talker.stages
        spoken = (_joint(first, mind, "text", "speech_text"), *first.request_edges())
        stages.append(_with_weights(talker, first, spoken))
        stages += [_with_weights(talker, stage, stage.inputs) for stage in others]
    voice = None if talker is None else talker.pipeline
    ear = thinker.pipeline if listener is None else listener.pipeline
    return PipelineConfig(
        name=NAME,
        description="a listener, a thinker and a talker of other pipelines: "
        + ", ".join(f"{role} of {part.pipeline.name}" for role, part in parts.items()),
        stages=tuple(stages),
        untried="its parts are run as stages of their own pipelines",
        voices=voice.voices if voice else Voices(),
        speech_speed=voice.speech_speed if voice else (1.0, 1.0),
        languages=ear.languages,
        sampled_outputs=tuple(dict.fromkeys(("text", *(k for k in (voice.sampled_outputs if voice else ()))))),
        input_audio_sample_rate=ear.input_audio_sample_rate,
        input_video=thinker.pipeline.input_video,
        max_input_audio_seconds=ear.max_input_audio_seconds,
        max_audio_seconds=voice.max_audio_seconds if voice else thinker.pipeline.max_audio_seconds,
    )


def _joint(stage: StagePipelineConfig, source: StagePipelineConfig, kind: OutputKind, part: RequestPart) -> Edge:
    """The edge that joins two parts: the stage's own for this kind, or its request edge with ``part`` written anew."""
    for edge in stage.stage_edges():
        if edge.takes == kind:
            return edge.model_copy(update={"source": source.name})
    asked = _asked_with(stage, part)
    assert asked is not None
    reads: tuple[RequestPart, ...] = ("messages",) if part == "messages" else ()
    assert asked.source == REQUEST
    return Edge(source=source.name, processor=asked.processor, parts=reads, takes=kind, rewrites=part)


def _with_weights(part: _Part, stage: StagePipelineConfig, inputs: tuple[Edge, ...]) -> StagePipelineConfig:
    return stage.model_copy(update={"inputs": inputs, "prepare": stage.prepare or part.pipeline.prepare})
