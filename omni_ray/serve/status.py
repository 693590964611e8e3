"""How applications are: as Serve's controller tells, and as their own replicas do.

``serve.status`` tells the same, and pickles a request router for every deployment on the way: 90 ms of CPU for twelve
of them, twice that in a process with torch, where this takes 1.5 ms. Who waits for an application asks many times.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ApplicationStatus, DeploymentStatus, ReplicaState

ANSWER_S: Final = 5.0
"""In which a replica answers, however busy it is."""


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica; without ``node_id`` as long as no node has it."""

    state: ReplicaState
    node_id: str | None
    node_ip: str | None


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """One deployment: what Serve says of it, how many replicas it shall have, and those there are."""

    status: DeploymentStatus
    message: str
    target_num_replicas: int
    replicas: tuple[ReplicaView, ...]

    def running(self) -> int:
        """How many replicas run."""
        return sum(replica.state == ReplicaState.RUNNING for replica in self.replicas)


@dataclass(frozen=True, slots=True)
class ApplicationView:
    """One application, and its deployments by their names."""

    status: ApplicationStatus
    message: str
    deployments: Mapping[str, DeploymentView]


def applications() -> dict[str, ApplicationView]:
    """Every application of the cluster by its name; none where Serve does not run. Blocks while the controller answers.

    Raises:
        RayActorError: the controller is gone or being replaced.
    """
    client: Any = _get_global_client(raise_if_no_controller_running=False)  # serve.status is the only public way
    known = {} if client is None else client.get_serve_details()["applications"]
    return {name: _application(told) for name, told in known.items()}


def ask(deployment: str, application: str, method: str) -> list[Any]:
    """What each replica of the deployment answers to a call of ``method``; blocks for at most ``ANSWER_S``.

    Raises:
        Exception: of any kind, where one of them does not answer.
    """
    handle = serve.get_deployment_handle(deployment, application)
    if not handle.is_initialized:  # in HAProxy mode it would want the loop of its process, and commands have none
        handle._init(_run_router_in_separate_loop=True)
    return list(handle.broadcast(method).results(timeout_s=ANSWER_S))


def _application(told: Mapping[str, Any]) -> ApplicationView:
    deployments = {name: _deployment(each) for name, each in told["deployments"].items()}
    return ApplicationView(ApplicationStatus(told["status"]), told["message"], deployments)


def _deployment(told: Mapping[str, Any]) -> DeploymentView:
    replicas = [
        ReplicaView(ReplicaState(each["state"]), each.get("node_id"), each.get("node_ip")) for each in told["replicas"]
    ]
    status = DeploymentStatus(told["status"])
    return DeploymentView(status, told["message"], told["target_num_replicas"], tuple(replicas))
