"""What an application that is starting waits for: which stage has no node and why, which loads and where.

Serve's own message says so after 30 s, and only "waiting for resources".
"""

from dataclasses import replace
from typing import Any

from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationDetails, DeploymentDetails, DeploymentStatus, ReplicaState, ServeInstanceDetails

from omni_ray.serve.cluster import Need, asked_for, free_nodes, held_back, needs, place
from omni_ray.serve.resolve import ResolvedApp


def http_port() -> int:
    """The port that Serve answers on: its own, where it was started before us."""
    return int(_client().http_config.port)


def waiting_for(app: ResolvedApp) -> list[str]:
    """One sentence per deployment that is not up; empty when all are, or when Serve does not know the application."""
    details = ServeInstanceDetails(**_client().get_serve_details())
    known = details.applications.get(app.pipeline.name)
    if known is None:
        return []
    return [said for need in needs(app) if (said := _sentence(need, known))]


def _client() -> Any:
    """Serve's client; where replicas are and what HTTP listens on has no public call."""
    return _get_global_client()


def _sentence(need: Need, known: ApplicationDetails) -> str | None:
    deployment: DeploymentDetails | None = known.deployments.get(need.deployment)
    if deployment is None or deployment.status == DeploymentStatus.HEALTHY:
        return None
    up = sum(r.state == ReplicaState.RUNNING for r in deployment.replicas)
    starting = [r for r in deployment.replicas if r.state == ReplicaState.STARTING]
    said = [f"{need.deployment}: {up} of {deployment.target_num_replicas} replicas run"]
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
