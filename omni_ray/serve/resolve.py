"""From a pipeline's name and the user's arguments to the exact specification of every deployment. No cluster needed.

Everything is checked here, together, before any actor starts: the declaration, the deploy config, each engine's
options, Ray Serve's options and what follows from them.
"""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError, field_validator, model_validator

from omni_ray.config.base import StrictModel, suggest
from omni_ray.config.deploy import (
    DeployConfig,
    parse_deploy_config,
    read_deploy_config,
    valid_part,
    validation_problems,
)
from omni_ray.config.ingress import GRACE_MARGIN_S
from omni_ray.config.pipeline import PipelineConfig, StagePipelineConfig
from omni_ray.engine.options import EngineOptions
from omni_ray.errors import ConfigError
from omni_ray.registry import OmniModelRegistry, engine_entry, engine_options, import_dotted, load_pipeline
from omni_ray.serve.colocation import Member, groups, member_problems, order_problems, shared_block
from omni_ray.serve.planner import Plan, all_plans, calls_of
from omni_ray.serve.serve_options import (
    MAY_NOT_BE_SET,
    DeploymentBlock,
    IngressDeployment,
    ServeOptions,
    StageDeployment,
    derive,
    most_replicas,
)
from omni_ray.serve.specs import DeploymentSpec, IngressSpec, StageSpec

M = TypeVar("M", bound=BaseModel)


class AppArgs(StrictModel):
    """Arguments of an application: ``serve run graphs:x model=... deploy_config=...``, or ``args:`` in a Serve config.

    Attributes:
        model: checkpoint directory or hub id; wins over the deploy config's.
        deploy_config: path of a YAML file, or the same keys inline.
        served_model_name: the model id that clients use.
    """

    model: str | None = None
    deploy_config: str | dict[str, Any] | None = None
    served_model_name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            unknown = [str(k) for k in data if k not in cls.model_fields]
            if unknown:
                raise ValueError("; ".join(f"unknown argument {k!r}; {suggest(k, cls.model_fields)}" for k in unknown))
        return data

    @field_validator("model", "deploy_config", "served_model_name")
    @classmethod
    def _not_blank(cls, value: Any) -> Any:
        if value == "":
            raise ValueError("is empty; give a value or leave it out")
        return value


def app_args(given: Mapping[str, Any]) -> AppArgs:
    """Arguments from a command line; ``ConfigError`` names each unknown one and the nearest known."""
    try:
        return AppArgs.model_validate(dict(given))
    except ValidationError as error:
        raise ConfigError([_argument_problem(item["loc"], item["msg"]) for item in error.errors()]) from error


def _argument_problem(loc: tuple[int | str, ...], message: str) -> str:
    message = message.removeprefix("Value error, ")
    return f"argument {loc[0]!r}: {message[0].lower()}{message[1:]}" if loc else message


@dataclass(frozen=True, slots=True)
class ResolvedApp:
    """An application, ready to be bound: a spec per deployment in the order data flows, and the ingress's."""

    pipeline: PipelineConfig
    config: DeployConfig
    deployments: tuple[DeploymentSpec, ...]
    ingress: IngressSpec
    plans: tuple[Plan, ...]

    @property
    def stages(self) -> tuple[StageSpec, ...]:
        """Every stage, in the order data flows."""
        specs = {stage.stage: stage for deployment in self.deployments for stage in deployment.stages}
        return tuple(specs[stage.name] for stage in self.pipeline.topological())

    def calls(self, deployment: DeploymentSpec) -> frozenset[str]:
        """Stages of other deployments that this one's may open streams to, over all requests."""
        own = {stage.stage for stage in deployment.stages}
        return frozenset().union(*(calls_of(self.plans, name) for name in own)) - own


def resolve(name: str, args: AppArgs) -> ResolvedApp:
    """Check and derive everything.

    Raises:
        ConfigError: with every problem found.
    """
    where, raw = read_deploy_config(args.deploy_config)
    problems: list[str] = []
    try:
        config = parse_deploy_config(where, raw)
    except ConfigError as error:
        problems += error.problems
        config = valid_part(raw)
    model = args.model or config.model
    try:
        pipeline = load_pipeline(name, model, config.variant)
        plans = tuple(all_plans(pipeline))
    except ConfigError as error:
        raise ConfigError([*error.problems, *problems]) from error
    problems += config.problems_for(pipeline, where)
    problems += _reference_problems(pipeline)
    problems += order_problems(pipeline, plans, config.colocate, where)
    deployments, ingress = _deployments(pipeline, config, model, where, args, problems)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    assert ingress is not None
    return ResolvedApp(pipeline, config, tuple(deployments), ingress, plans)


def _deployments(
    pipeline: PipelineConfig, config: DeployConfig, model: str | None, where: str, args: AppArgs, problems: list[str]
) -> tuple[list[DeploymentSpec], IngressSpec | None]:
    """Specs of every deployment; what is wrong goes to ``problems``."""
    block = _block(IngressDeployment, config.ingress.deployment, where, ("ingress", "deployment"), problems)
    ingresses = 1 if block is None else most_replicas(block)
    admitted = config.ingress.max_concurrent_requests * ingresses
    seconds = config.ingress.longest_speech_s(pipeline)
    grace = config.ingress.grace_s or seconds + GRACE_MARGIN_S
    if seconds > pipeline.max_audio_seconds:
        problems.append(
            f"{where}: ingress.max_audio_seconds: {seconds:g} is beyond the {pipeline.max_audio_seconds:g} s that "
            f"pipeline {pipeline.name!r} is good for"
        )
    if (heard := config.ingress.max_input_audio_seconds or 0) > pipeline.max_input_audio_seconds:
        problems.append(
            f"{where}: ingress.max_input_audio_seconds: {heard:g} is beyond the {pipeline.max_input_audio_seconds:g} s "
            f"that pipeline {pipeline.name!r} is good for"
        )
    specs = []
    for names in groups(pipeline, config.colocate):
        members = [m for name in names if (m := _member(pipeline.stage(name), config, where, problems)) is not None]
        if len(members) < len(names):
            continue
        if len(members) > 1 and (found := member_problems(members, where)):
            problems += found
            continue
        # twice what can be admitted: retries and streams that are just ending hold a slot a little longer
        ongoing, host = 2 * admitted + 16, members[-1]
        devices = host.options.devices()
        derived = _derived(host.name, host.declared, shared_block(members), ongoing, grace, where, problems, devices)
        if derived is None:
            continue
        for member in members:
            gpus = member.num_gpus if len(members) > 1 else derived.num_gpus
            problems += [
                f"{where}: stages.{member.name}.engine.{problem}" for problem in member.options.placement_problems(gpus)
            ]
        stages = tuple(_stage_spec(pipeline, member, config, model) for member in members)
        specs.append(DeploymentSpec(stages, derived))
    if block is None:
        return specs, None
    # the ingress itself answers 503 beyond its limit, so Serve must let more than that through
    derived = _derived("ingress", None, block, 4 * config.ingress.max_concurrent_requests + 64, grace, where, problems)
    if derived is None:
        return specs, None
    model_name = args.served_model_name or config.served_model_name or pipeline.name
    return specs, IngressSpec(pipeline, config.ingress, config.streaming, config.observe, model_name, derived)


def _member(stage: StagePipelineConfig, config: DeployConfig, where: str, problems: list[str]) -> Member | None:
    options = _engine_options(stage, config.stage(stage.name).engine, where, problems)
    prefix = ("stages", stage.name, "deployment")
    block = _block(StageDeployment, config.stage(stage.name).deployment, where, prefix, problems)
    return None if options is None or block is None else Member(stage, block, options)


def _stage_spec(pipeline: PipelineConfig, member: Member, config: DeployConfig, model: str | None) -> StageSpec:
    said = config.stage(member.name)
    engine, entry = engine_entry(member.declared, said.engine.get("name"))
    return StageSpec(
        pipeline=pipeline,
        stage=member.name,
        model=said.model or model,
        model_arch=member.declared.arch_for(engine),
        load_format=config.load_format,
        engine_path=entry.path,
        engine_options=member.options,
        sampling=said.sampling,
        streaming=config.streaming,
        async_chunk=config.async_chunk,
        observe=config.observe,
    )


def _derived(
    name: str,
    declared: StagePipelineConfig | None,
    block: DeploymentBlock,
    ongoing: int,
    grace: float,
    where: str,
    problems: list[str],
    devices: int = 1,
) -> ServeOptions | None:
    try:
        return derive(name, declared, block, max_ongoing_requests=ongoing, grace_s=math.ceil(grace), devices=devices)
    except ConfigError as error:
        problems += [f"{where}: {p}" for p in error.problems]
        return None


def _engine_options(
    stage: StagePipelineConfig, raw: Mapping[str, Any], where: str, problems: list[str]
) -> EngineOptions | None:
    given = dict(raw)
    chosen = given.pop("name", None)
    prefix = ("stages", stage.name, "engine")
    if not isinstance(chosen, str | None):
        problems.append(f"{where}: {'.'.join(prefix)}.name: must be an engine's name, got {chosen!r}")
        return None
    try:
        model = engine_options(stage, chosen)
    except ConfigError as error:
        problems += [f"{where}: {p}" for p in error.problems]
        return None
    options = _checked(model, given, where, prefix, problems)
    limit = stage.limits.max_num_seqs
    if options is None or limit is None:
        return options
    if "max_num_seqs" in given and options.max_num_seqs > limit:
        problems.append(
            f"{where}: {'.'.join(prefix)}.max_num_seqs: {options.max_num_seqs} is more than {limit}, the limit of "
            f"{stage.model_arch}: {stage.limits.reason}"
        )
    return options.model_copy(update={"max_num_seqs": min(limit, options.max_num_seqs)})


def _block(
    model: type[M], raw: Mapping[str, Any], where: str, prefix: tuple[str, ...], problems: list[str]
) -> M | None:
    """A ``deployment:`` block, less the options that may not be set."""
    for name in [n for n in raw if n in MAY_NOT_BE_SET]:
        problems.append(f"{where}: {'.'.join(prefix)}.{name}: may not be set: {MAY_NOT_BE_SET[name]}")
    allowed = {n: v for n, v in raw.items() if n not in MAY_NOT_BE_SET}
    return _checked(model, allowed, where, prefix, problems)


def _checked(
    model: type[M], raw: Mapping[str, Any], where: str, prefix: tuple[str, ...], problems: list[str]
) -> M | None:
    """``raw`` as ``model``, or None with what is wrong added to ``problems``."""
    try:
        return model.model_validate(dict(raw))
    except ValidationError as error:
        problems += validation_problems(error, model, where, prefix)
        return None


def _reference_problems(pipeline: PipelineConfig) -> list[str]:
    """Names in the declaration that lead nowhere, and processors that are no async generators (C60).

    Engines and model classes are heavy, so only their names are looked up here; the stages import them.
    """
    problems = []
    for stage in pipeline.stages:
        where = f"pipeline {pipeline.name!r}, stage {stage.name!r}"
        for arch in dict.fromkeys((stage.model_arch, *stage.engine_archs.values())):
            if not OmniModelRegistry.known(arch):
                problems.append(f"{where}: model_arch {arch!r} is not registered")
        for edge in stage.inputs:
            try:
                processor = import_dotted(edge.processor)
            except ConfigError as error:
                problems += [f"{where}, processor: {problem}" for problem in error.problems]
                continue
            if not inspect.isasyncgenfunction(processor):
                problems.append(
                    f"{where}: processor {edge.processor!r} is no async generator; write `async def` with `yield`"
                )
    return problems
