"""Stages that share one process (``colocate:`` in a deploy config): what that asks of them, and what one replica needs.

The last of them in the order data flows gives the deployment its name and its options; of the others only the amounts
in ``ray_actor_options`` count, which are added up.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from omni_ray.config.pipeline import PipelineConfig, StagePipelineConfig
from omni_ray.engine.options import EngineOptions
from omni_ray.serve.planner import Plan, calls_of
from omni_ray.serve.serve_options import RayActorOptions, StageDeployment

AMOUNTS = ("num_cpus", "num_gpus", "memory", "resources")
"""Keys of ``ray_actor_options`` that are added up; Ray knows four decimals of each."""


@dataclass(frozen=True, slots=True)
class Member:
    """A stage of a deployment, with what the deploy config says of it."""

    declared: StagePipelineConfig
    block: StageDeployment
    options: EngineOptions

    @property
    def name(self) -> str:
        """The stage's."""
        return self.declared.name

    @property
    def num_cpus(self) -> float:
        """CPUs that the stage needs."""
        said = self.block.ray_actor_options.num_cpus
        return self.declared.num_cpus if said is None else said

    @property
    def num_gpus(self) -> float:
        """GPUs, or the part of one, that the stage needs."""
        said = self.block.ray_actor_options.num_gpus
        return self.declared.num_gpus if said is None else said


def groups(pipeline: PipelineConfig, colocated: Sequence[str]) -> list[tuple[str, ...]]:
    """The stages of each deployment; stages, and deployments by their last stage, in the order data flows."""
    order = [stage.name for stage in pipeline.topological()]
    shared = tuple(name for name in order if name in colocated)
    return [shared if name in shared else (name,) for name in order if name not in shared[:-1]]


def order_problems(pipeline: PipelineConfig, plans: Sequence[Plan], colocated: Sequence[str], where: str) -> list[str]:
    """Stages that lie between those that share a process: two deployments would then call each other."""
    calls = {stage.name: calls_of(plans, stage.name) for stage in pipeline.stages}
    upstream = {name: _closure(name, calls) for name in calls}
    return [
        f"{where}: colocate: stage {name!r} lies between stages of {', '.join(colocated)}; name it too"
        for name in calls
        if name not in colocated
        and upstream[name] & {*colocated}
        and any(name in upstream[shared] for shared in colocated if shared in upstream)
    ]


def _closure(name: str, calls: Mapping[str, frozenset[str]]) -> frozenset[str]:
    return calls[name].union(*(_closure(called, calls) for called in calls[name]))


def member_problems(members: Sequence[Member], where: str) -> list[str]:
    """What keeps several ``members`` from sharing a process."""
    last = members[-1].name
    problems = []
    for member in members:
        key = f"{where}: stages.{member.name}"
        if member.options.own_process is not None:
            problems.append(f"{key}.engine: cannot be one of colocate: {member.options.own_process}")
        if (devices := member.options.devices()) > 1:
            problems.append(f"{key}.engine: computes on {devices} GPUs; a stage in colocate computes on one at most")
    theirs, their_actor = _given(members[-1].block)
    for member in members[:-1]:
        mine, actor = _given(member.block)
        prefix = f"stages.{member.name}.deployment"
        for path, keys, wanted in (("", mine, theirs), (".ray_actor_options", actor, their_actor)):
            problems += [
                f"{where}: {prefix}{path}.{key}: {member.name} runs in the replicas of {last} (colocate); "
                f"give it at stages.{last}.deployment{path}.{key}"
                for key, value in keys.items()
                if key not in AMOUNTS and wanted.get(key) != value
            ]
    gpus = _sum(member.num_gpus for member in members)
    if gpus > 1:
        problems.append(
            f"{where}: colocate: {', '.join(m.name for m in members)} have num_gpus {gpus:g} together; they share one "
            f"GPU, so lower stages.{last}.deployment.ray_actor_options.num_gpus or another's"
        )
    return problems


def _given(block: StageDeployment) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the deploy config says: of the deployment, of its ``ray_actor_options``."""
    keys = block.model_dump(exclude_unset=True)
    actor: dict[str, Any] = keys.pop("ray_actor_options", {})
    return keys, actor


def shared_block(members: Sequence[Member]) -> StageDeployment:
    """The last one's ``deployment:`` block, with what all of them need."""
    block = members[-1].block
    if len(members) == 1:
        return block
    resources: Counter[str] = Counter()
    for member in members:
        resources.update(member.block.ray_actor_options.resources)
    memory = [m.block.ray_actor_options.memory or 0 for m in members]
    needed: dict[str, Any] = {
        "num_cpus": _sum(member.num_cpus for member in members),
        "num_gpus": _sum(member.num_gpus for member in members),
        "resources": {name: round(amount, 4) for name, amount in resources.items()},
    }
    if any(memory):
        needed["memory"] = sum(memory)
    actor = RayActorOptions(**{**block.ray_actor_options.model_dump(exclude_unset=True), **needed})
    return block.model_copy(update={"ray_actor_options": actor})


def _sum(amounts: Iterable[float]) -> float:
    return round(sum(amounts), 4)
