"""What an application that is starting waits for: which stage has no node and why, which loads and where.

Serve's own message says so after 30 s, and only "waiting for resources".
"""

from dataclasses import replace

from ray.serve.context import _get_global_client
from ray.serve.schema import DeploymentStatus, ReplicaState

from omni_ray.serve.cluster import Need, asked_for, free_nodes, held_back, needs, place
from omni_ray.serve.resolve import ResolvedApp
from omni_ray.serve.status import ApplicationView


def http_port() -> int:
    """The port that Serve answers on: its own, where it was started before us."""
    return int(_get_global_client().http_config.port)  # there is no public call for it


def waiting_for(app: ResolvedApp, known: ApplicationView) -> list[str]:
    """One sentence per deployment that is not up; empty when all are."""
    return [said for need in needs(app) if (said := _sentence(need, known))]


def _sentence(need: Need, known: ApplicationView) -> str | None:
    deployment = known.deployments.get(need.deployment)
    if deployment is None or deployment.status == DeploymentStatus.HEALTHY:
        return None
    starting = [r for r in deployment.replicas if r.state == ReplicaState.STARTING]
    said = [f"{need.deployment}: {deployment.running()} of {deployment.target_num_replicas} replicas run"]
    if loading := sorted({str(r.node_ip) for r in starting if r.node_id}):
        said.append(f"loading on {', '.join(loading)}")
    if without := sum(r.node_id is None for r in starting):
        nodes = free_nodes()  # first: what our own replica takes meanwhile is not missing
        (fit,) = place([replace(need, replicas=min(without, held_back(need)))], nodes)
        reason = fit.missing or "a process is being started"
        said.append(f"{without} without a node, needing {asked_for(need)}: {reason}")
    if deployment.status != DeploymentStatus.UPDATING and deployment.message:
        said.append(deployment.message.strip().splitlines()[0])
    return "; ".join(said)
