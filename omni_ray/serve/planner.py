"""The smallest sub-graph that answers a request, walked as a tree of streams.

Choosing: back from the outputs asked for, every stage is fed either by all its stage edges or by one request edge that
replaces them. Of all choices that read every part the request supplies, the one with the fewest stages wins, so text
in needs no listener, text out no talker, and the speech endpoint starts at the talker.

Walking: one stream per edge and nothing attaches to a running request by a second call. Stages are taken in
topological order; each opens the streams that carry its sources and becomes the one stream through which everything
upstream of it now travels. So a second consumer of a stage reads it from the trunk, as tagged events.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from omni_ray.config.pipeline import (
    Edge,
    OutputKind,
    PipelineConfig,
    RequestPart,
    StageExecutionType,
    StagePipelineConfig,
)
from omni_ray.errors import ConfigError, InvalidRequestError


@dataclass(frozen=True, slots=True)
class PlanStage:
    """One stage's part in a plan.

    Attributes:
        name: the stage.
        edges: indices into the stage's ``inputs`` that feed it in this plan.
        calls: stages it opens streams to.
        feeds: stages, itself or upstream, whose outputs some stage further down consumes: they pass whole. (Final
            outputs pass as well, but only the chunks the client asked for.)
        by_reference: whether its own output stream may carry object refs.
    """

    name: str
    edges: tuple[int, ...]
    calls: tuple[str, ...]
    feeds: frozenset[str]
    by_reference: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """The stages a request needs.

    Attributes:
        trunk: the stage whose stream the ingress opens.
        outputs: each kind asked for and the stage that makes it.
        stages: in the order data flows.
        sampled: the stage that the client's sampling parameters are for: the one that owns the tokenizer, or where
            there is none (speech) the first autoregressive one.
    """

    trunk: str
    outputs: tuple[tuple[OutputKind, str], ...]
    stages: tuple[PlanStage, ...]
    sampled: str

    def stage(self, name: str) -> PlanStage:
        """The part of stage ``name``."""
        return next(s for s in self.stages if s.name == name)

    def upstream(self, name: str) -> frozenset[str]:
        """``name`` and every stage whose outputs can reach it."""
        return _upstream(name, {stage.name: stage.calls for stage in self.stages})

    def names(self) -> tuple[str, ...]:
        """Stages in the order data flows."""
        return tuple(s.name for s in self.stages)


T = TypeVar("T")
_Choice = dict[str, tuple[int, ...]]


def make_plan(pipeline: PipelineConfig, outputs: Collection[OutputKind], parts: Collection[RequestPart]) -> Plan:
    """The plan for ``outputs`` when the request supplies ``parts``.

    Raises:
        InvalidRequestError: the pipeline makes no such output, or not from these parts.
    """
    makers = {s.final_output_type: s for s in pipeline.stages if s.final_output_type in outputs}
    for kind in outputs:
        if kind not in makers:
            known = ", ".join(pipeline.output_kinds())
            raise InvalidRequestError(f"pipeline {pipeline.name} makes no {kind}; it makes: {known}", "modalities")
    supplied = frozenset(parts)
    kinds = tuple((kind, makers[kind].name) for kind in pipeline.output_kinds() if kind in makers)
    wanted = [name for _, name in kinds]
    plans = (
        plan
        for choice in _choices(pipeline, wanted, {}, supplied)
        if _parts_read(pipeline, choice) >= supplied and (plan := _walk(pipeline, choice, kinds)) is not None
    )
    best = min(plans, key=lambda plan: len(plan.stages), default=None)
    if best is None:
        given = " and ".join(sorted(parts)) or "nothing"
        raise InvalidRequestError(f"pipeline {pipeline.name} cannot make {' and '.join(sorted(outputs))} from {given}")
    return best


def _choices(
    pipeline: PipelineConfig, wanted: list[str], chosen: _Choice, supplied: frozenset[RequestPart]
) -> Iterator[_Choice]:
    """All ways to feed the ``wanted`` stages and everything they need upstream."""
    wanted = [name for name in wanted if name not in chosen]
    if not wanted:
        yield chosen
        return
    stage = pipeline.stage(wanted[0])
    for edges in _feeds(stage):
        if not all(set(stage.inputs[i].parts) <= supplied for i in edges):
            continue
        sources = [stage.inputs[i].source for i in edges if stage.inputs[i] in stage.stage_edges()]
        yield from _choices(pipeline, wanted[1:] + sources, {**chosen, stage.name: edges}, supplied)


def _feeds(stage: StagePipelineConfig) -> Iterator[tuple[int, ...]]:
    """Each request edge on its own, or all stage edges together."""
    stage_edges = tuple(i for i, edge in enumerate(stage.inputs) if edge in stage.stage_edges())
    yield from ((i,) for i in range(len(stage.inputs)) if i not in stage_edges)
    if stage_edges:
        yield stage_edges


def _parts_read(pipeline: PipelineConfig, choice: _Choice) -> frozenset[RequestPart]:
    return frozenset(
        part for name, edges in choice.items() for i in edges for part in pipeline.stage(name).inputs[i].parts
    )


def _walk(pipeline: PipelineConfig, choice: _Choice, outputs: tuple[tuple[OutputKind, str], ...]) -> Plan | None:
    """The choice as a tree of streams; None if its outputs end in separate streams."""
    order = [s for s in pipeline.topological() if s.name in choice]
    fed = {s.name: [s.inputs[i] for i in choice[s.name] if s.inputs[i] in s.stage_edges()] for s in order}
    carrier = {s.name: s.name for s in order}  # the stage through whose stream each stage's outputs now travel
    calls: dict[str, tuple[str, ...]] = {}
    for stage in order:
        calls[stage.name] = tuple(dict.fromkeys(carrier[edge.source] for edge in fed[stage.name]))
        for name, through in carrier.items():
            if through in calls[stage.name]:
                carrier[name] = stage.name
    ends = sorted(set(carrier.values()))
    if len(ends) != 1:
        return None
    # a stage with one consumer that takes refs may send refs, to whoever reads it further down as well
    parts = _parts_read(pipeline, choice)
    referenced = {edge.source for edges in fed.values() for edge in edges if edge.carries_refs_of(parts)}
    stages = []
    for i, stage in enumerate(order):
        later = {edge.source for after in order[i + 1 :] for edge in fed[after.name]}
        feeds = _upstream(stage.name, calls) & later
        by_reference = bool(feeds & referenced)
        stages.append(PlanStage(stage.name, choice[stage.name], calls[stage.name], feeds, by_reference))
    by_need = sorted(order, key=lambda s: (not s.owns_tokenizer, s.execution_type != StageExecutionType.LLM_AR))
    return Plan(ends[0], outputs, tuple(stages), by_need[0].name)


def _upstream(name: str, calls: Mapping[str, tuple[str, ...]]) -> frozenset[str]:
    """``name`` and every stage whose outputs can reach it."""
    return frozenset({name}).union(*(_upstream(called, calls) for called in calls[name]))


def all_plans(pipeline: PipelineConfig) -> list[Plan]:
    """Every plan that some request can get.

    Raises:
        ConfigError: some combination of outputs cannot be walked as one tree, or nothing can be asked at all.
    """
    kinds = pipeline.output_kinds()
    parts = sorted({part for stage in pipeline.stages for edge in stage.inputs for part in edge.parts})
    plans: dict[Plan, None] = {}
    for outputs in _subsets(kinds):
        for supplied in _subsets(parts):
            try:
                plans[make_plan(pipeline, outputs, supplied)] = None
            except InvalidRequestError:
                continue
    made = {tuple(kind for kind, _ in plan.outputs) for plan in plans}
    problems = [
        f"pipeline {pipeline.name!r}: no request leads to {' and '.join(outputs)} in one stream; every stage must be "
        f"reachable from a request edge, and one trunk must carry every output"
        for outputs in _subsets(kinds)
        if outputs not in made
    ]
    if problems:
        raise ConfigError(problems)
    return list(plans)


def calls_of(plans: Collection[Plan], stage: str) -> frozenset[str]:
    """Stages that ``stage`` may open streams to, over all ``plans``."""
    return frozenset(called for plan in plans for part in plan.stages if part.name == stage for called in part.calls)


def _subsets(items: Collection[T]) -> Iterator[tuple[T, ...]]:
    for n in range(1, len(items) + 1):
        yield from itertools.combinations(items, n)


def feeding_edge(stage: StagePipelineConfig, part: PlanStage, source: str) -> Edge | None:
    """The edge by which ``source`` feeds ``stage`` in this plan, or None if its events only pass through."""
    return next((stage.inputs[i] for i in part.edges if stage.inputs[i].source == source), None)
