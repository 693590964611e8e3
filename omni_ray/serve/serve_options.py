"""Ray Serve's options of one deployment: what a deploy config may say, what is derived, what the replica really got.

``ray_actor_options`` says what one replica needs. Everything else that Serve wants to know follows from it, from the
engine's options and from the ingress's limits, in ``derive``, so that the parts cannot contradict each other.
"""

from typing import Any, Literal, TypeAlias

import ray
from pydantic import Field
from ray import serve
from ray.serve.schema import LoggingConfig

from omni_ray.config.base import StrictModel
from omni_ray.config.pipeline import StagePipelineConfig
from omni_ray.errors import ConfigError
from omni_ray.serve.autoscaling import StageAutoscaling, StrictAutoscaling
from omni_ray.serve.slack import Tuning

MAY_NOT_BE_SET = {
    "max_queued_requests": "Serve never queues here; the bounded queue is engine.max_queue",
    "max_ongoing_requests": "derived from ingress.max_concurrent_requests; the engine's limit is engine.max_num_seqs",
    "placement_group_bundles": "derived from ray_actor_options and the engine's options",
    "name": "a stage's name is its deployment's name",
    "user_config": "all settings go through this deploy config",
    "request_router_config": "one stream per request is the only affinity",
    "graceful_shutdown_timeout_s": "derived from ingress.max_audio_seconds, or set by ingress.grace_s",
}
"""Serve options that a deploy config may not set, and why."""


class RayActorOptions(StrictModel):
    """What one replica needs; Ray's own names."""

    num_cpus: float | None = Field(default=None, gt=0)
    num_gpus: float | None = Field(default=None, ge=0)
    memory: float | None = Field(default=None, gt=0)
    resources: dict[str, float] = Field(default_factory=dict)
    accelerator_type: str | None = None
    label_selector: dict[str, str] = Field(default_factory=dict)
    runtime_env: dict[str, Any] | None = None


class _Deployment(StrictModel):
    """The options of Ray Serve that may be set in any ``deployment:`` block."""

    num_replicas: int | None = Field(default=None, ge=1, strict=True)
    ray_actor_options: RayActorOptions = RayActorOptions()
    placement_group_strategy: Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"] | None = None
    max_replicas_per_node: int | None = Field(default=None, ge=1)
    health_check_period_s: float = Field(default=5, gt=0)
    health_check_timeout_s: float = Field(default=30, gt=0)
    max_constructor_retry_count: int = Field(default=3, ge=1)
    rolling_update_percentage: float | None = Field(default=None, gt=0, le=1)
    max_surge_percent: int | None = Field(default=None, ge=0)
    logging_config: LoggingConfig | None = None


class IngressDeployment(_Deployment):
    """The ``deployment:`` block of the ingress."""

    autoscaling_config: StrictAutoscaling | None = None


class StageDeployment(_Deployment):
    """The ``deployment:`` block of a stage."""

    autoscaling_config: StageAutoscaling | None = None


DeploymentBlock: TypeAlias = IngressDeployment | StageDeployment


class ServeOptions(StrictModel):
    """The options a deployment is bound with, as derived. ``serve`` holds Serve's own names.

    Attributes:
        num_replicas: the most there can be; of an autoscaled deployment, ``min_replicas`` is the least.
        tuning: by which it scales, and by which it says how much it has to do.
    """

    num_cpus: float
    num_gpus: float
    resources: dict[str, float]
    num_replicas: int
    max_ongoing_requests: int
    graceful_shutdown_timeout_s: float
    autoscaled: bool
    min_replicas: int
    tuning: Tuning
    serve: dict[str, Any]


def derive(
    stage: str,
    declared: StagePipelineConfig | None,
    block: DeploymentBlock,
    *,
    max_ongoing_requests: int,
    grace_s: float,
    devices: int = 1,
) -> ServeOptions:
    """Options of one deployment.

    Args:
        stage: its name, for messages.
        declared: the stage's declaration, None for the ingress.
        block: what the deploy config says.
        max_ongoing_requests: more than all ingress replicas together may admit, so that Serve never queues.
        grace_s: how long a leaving replica may finish its streams.
        devices: GPUs that its engine computes on; if more than one, so many are the default of ``num_gpus``.

    Raises:
        ConfigError: options that contradict each other.
    """
    actor = block.ray_actor_options
    cpus = actor.num_cpus if actor.num_cpus is not None else declared.num_cpus if declared else 0.1
    gpus = actor.num_gpus if actor.num_gpus is not None else declared.num_gpus if declared else 0.0
    if devices > 1 and actor.num_gpus is None:
        gpus = float(devices)
    prefix = f"stages.{stage}.deployment" if declared else f"{stage}.deployment"
    if problems := _contradictions(block, gpus, prefix):
        raise ConfigError(problems)
    ray_actor_options: dict[str, Any] = actor.model_dump(exclude_none=True, exclude_defaults=True)
    ray_actor_options.update(num_cpus=cpus, num_gpus=gpus)
    options: dict[str, Any] = {
        "ray_actor_options": ray_actor_options,
        "max_ongoing_requests": max_ongoing_requests,
        "graceful_shutdown_timeout_s": grace_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": block.health_check_period_s,
        "health_check_timeout_s": block.health_check_timeout_s,
        "max_constructor_retry_count": block.max_constructor_retry_count,
    }
    if block.autoscaling_config is not None:
        options["autoscaling_config"] = block.autoscaling_config.serve()
    else:
        options["num_replicas"] = block.num_replicas or 1
    if gpus:
        options |= _placement_group(block, cpus, gpus)
    for name in ("max_replicas_per_node", "rolling_update_percentage", "max_surge_percent", "logging_config"):
        if (value := block.model_dump(exclude_unset=True).get(name)) is not None:
            options[name] = value
    scaling = block.autoscaling_config
    return ServeOptions(
        num_cpus=cpus,
        num_gpus=gpus,
        resources=actor.resources,
        num_replicas=most_replicas(block),
        max_ongoing_requests=max_ongoing_requests,
        graceful_shutdown_timeout_s=grace_s,
        autoscaled=scaling is not None,
        min_replicas=block.num_replicas or 1 if scaling is None else scaling.min_replicas,
        tuning=scaling.tuning() if isinstance(scaling, StageAutoscaling) else Tuning(),
        serve=options,
    )


def _contradictions(block: DeploymentBlock, gpus: float, prefix: str) -> list[str]:
    problems = []
    if block.num_replicas is not None and block.autoscaling_config is not None:
        problems.append(f"{prefix}: num_replicas and autoscaling_config exclude each other; keep one")
    if gpus > 1 and gpus != int(gpus):
        problems.append(f"{prefix}.ray_actor_options.num_gpus: {gpus} is neither a fraction nor whole")
    if gpus and block.max_replicas_per_node is not None:
        problems.append(f"{prefix}.max_replicas_per_node: not combinable with a placement group (num_gpus)")
    if not gpus and block.placement_group_strategy is not None:
        problems.append(f"{prefix}.placement_group_strategy: has no effect without num_gpus")
    return problems


def _placement_group(block: DeploymentBlock, cpus: float, gpus: float) -> dict[str, Any]:
    """A stage that holds a GPU has its own placement group; bundle 0 equals the actor's options."""
    actor = block.ray_actor_options
    bundle = {"CPU": cpus, "GPU": gpus, **actor.resources, **({"memory": actor.memory} if actor.memory else {})}
    if actor.accelerator_type:  # Ray turns it into this resource of the actor, which must find it in its bundle
        bundle[f"accelerator_type:{actor.accelerator_type}"] = 0.001
    options: dict[str, Any] = {"placement_group_bundles": [bundle]}
    if actor.label_selector:  # or the group is reserved on a node where the actor may not run
        options["placement_group_bundle_label_selector"] = [actor.label_selector]
    return {**options, "placement_group_strategy": block.placement_group_strategy or "STRICT_PACK"}


def most_replicas(block: DeploymentBlock) -> int:
    """The most replicas there can be."""
    if block.autoscaling_config is not None:
        return int(block.autoscaling_config.max_replicas)
    return block.num_replicas or 1


def _bundles(derived: ServeOptions) -> dict[str, tuple[float, float]]:
    """Every resource of every bundle of this replica's placement group: what it is, what it should be."""
    group = ray.util.get_current_placement_group()
    actual: list[dict[str, float]] = group.bundle_specs if group else []
    wanted: list[dict[str, float]] = derived.serve.get("placement_group_bundles", [])
    out: dict[str, tuple[float, float]] = {"number of placement_group_bundles": (len(actual), len(wanted))}
    for index, (is_, should) in enumerate(zip(actual, wanted, strict=False)):
        for name in sorted(is_.keys() | should.keys()):
            out[f"placement_group_bundles[{index}].{name}"] = (is_.get(name, 0.0), should.get(name, 0.0))
    return out


def check_actual_options(stage: str, derived: ServeOptions) -> None:
    """Compare what this replica really got with what was derived.

    A ``deployments:`` block in a Serve config replaces options silently, and can so drop a GPU.

    Raises:
        ConfigError: naming every key that differs.
    """
    assigned = ray.get_runtime_context().get_assigned_resources()
    config = serve.get_replica_context()._deployment_config  # the only place where a replica sees its options
    if derived.num_gpus and not ray.get_gpu_ids():
        raise ConfigError([f"deployment {stage!r} has {derived.num_gpus:g} GPU but sees none (CUDA_VISIBLE_DEVICES)"])
    grace = min(config.graceful_shutdown_timeout_s, derived.graceful_shutdown_timeout_s)  # HAProxy mode lengthens it
    actual = {
        "ray_actor_options.num_cpus": (assigned.get("CPU", 0.0), derived.num_cpus),
        "ray_actor_options.num_gpus": (assigned.get("GPU", 0.0), derived.num_gpus),
        "max_ongoing_requests": (config.max_ongoing_requests, derived.max_ongoing_requests),
        "graceful_shutdown_timeout_s": (grace, derived.graceful_shutdown_timeout_s),
    }
    actual["max_queued_requests"] = (config.max_queued_requests, -1)
    actual["autoscaling_config (1 if there is one)"] = (config.autoscaling_config is not None, derived.autoscaled)
    for name in ("health_check_period_s", "health_check_timeout_s"):
        actual[name] = (dict(config)[name], derived.serve[name])
    for name, amount in derived.resources.items():
        actual[f"ray_actor_options.resources.{name}"] = (assigned.get(name, 0.0), amount)
    if "memory" in derived.serve["ray_actor_options"]:
        memory = derived.serve["ray_actor_options"]["memory"]
        actual["ray_actor_options.memory"] = (assigned.get("memory", 0.0), memory)
    actual |= _bundles(derived)
    if not derived.autoscaled:
        actual["num_replicas"] = (config.num_replicas, derived.num_replicas)
    where = "ingress.deployment" if stage == "ingress" else f"stages.{stage}.deployment"
    problems = [
        f"deployment {stage!r} runs with {key} = {is_}, but {should} was derived from the deploy config; remove the "
        f"deployments: block from the Serve config and set {where} in the deploy config"
        for key, (is_, should) in actual.items()
        if is_ is None or abs(is_ - should) > 1e-6
    ]
    if problems:
        raise ConfigError(problems)
