"""Whether a live cluster can hold an application: what each deployment needs beside what there is."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from omni_ray.errors import ConfigError
from omni_ray.serve.resolve import ResolvedApp
from omni_ray.serve.serve_options import ServeOptions


@dataclass(frozen=True, slots=True)
class Need:
    """What one deployment asks of the cluster: ``each`` replica's resources, times ``replicas``."""

    deployment: str
    replicas: int
    each: Mapping[str, float]


def needs(app: ResolvedApp) -> tuple[Need, ...]:
    """Needs of every deployment, in the order data flows, the ingress last."""
    return (*(_need(s.stage, s.derived) for s in app.stages), _need("ingress", app.ingress.derived))


def _need(name: str, derived: ServeOptions) -> Need:
    each = {"CPU": derived.num_cpus, **derived.resources}
    if derived.num_gpus:
        each["GPU"] = derived.num_gpus
    actor = derived.serve["ray_actor_options"]
    if "memory" in actor:
        each["memory"] = actor["memory"]
    if "accelerator_type" in actor:
        each[f"accelerator_type:{actor['accelerator_type']}"] = 0.001  # Ray's own marker for "a node that has one"
    return Need(name, derived.num_replicas, each)


def check_fits(app: ResolvedApp, available: Mapping[str, float]) -> None:
    """Compare needs with ``ray.cluster_resources()``.

    Raises:
        ConfigError: naming each deployment, what it needs and what the cluster has in all; Serve itself would wait for
            ever.
    """
    total: dict[str, float] = defaultdict(float)
    problems = []
    for need in needs(app):
        for resource, amount in need.each.items():
            total[resource] += amount * need.replicas
            if total[resource] > available.get(resource, 0) + 1e-6:
                problems.append(
                    f"{need.deployment} needs {amount:g} {resource} for each of {need.replicas} replicas; with the "
                    f"deployments before it that makes {total[resource]:g}, and the cluster has "
                    f"{available.get(resource, 0):g}"
                )
    if problems:
        raise ConfigError(problems)
