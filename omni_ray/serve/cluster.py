"""Whether a cluster can hold an application: every replica is given a node here, before Ray has to find one.

Ray waits for ever for a replica that no node can take, and says little about it.
"""

import math
import socket
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import ray
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._private.state import available_resources_per_node
from ray._raylet import IMPLICIT_RESOURCE_PREFIX  # type: ignore[attr-defined]
from ray.autoscaler.v2.sdk import get_cluster_status

from omni_ray.errors import ConfigError
from omni_ray.serve.resolve import ResolvedApp
from omni_ray.serve.serve_options import ServeOptions

_ROUNDING = 1e-6
_REACH_S = 5.0


@dataclass(frozen=True, slots=True)
class Need:
    """What one deployment asks of the cluster.

    Attributes:
        replicas: the most there can be, or the least. each: one replica's resources by Ray's names, memory in bytes.
        labels: the label selector of the nodes it may run on.
        per_node: most replicas on one node, None for no limit.
    """

    deployment: str
    replicas: int
    each: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    per_node: int | None = None


@dataclass(frozen=True, slots=True)
class Node:
    """A node's resources by Ray's names, and its labels."""

    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Fit:
    """How many replicas of a deployment found a node; ``missing`` says what the next one lacks, or is empty."""

    need: Need
    placed: int
    missing: str


def join(address: str, *, log_to_driver: bool) -> str:
    """Connect this process to the Ray cluster at ``host:port``, or ``auto``; returns its address.

    Raises:
        ConfigError: nothing listens there, or no cluster of this Ray and Python. Ray itself would try for minutes.
    """
    try:
        found = str(canonicalize_bootstrap_address_or_die(address))
        host, _, port = found.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
        ray.init(address=found, log_to_driver=log_to_driver)
    except (OSError, RuntimeError, ValueError) as error:  # ConnectionError is an OSError
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            [f"no Ray cluster can be joined at {address!r}: {reason}; give host:port of its GCS"]
        ) from error
    return found


def needs(app: ResolvedApp, *, least: bool = False) -> tuple[Need, ...]:
    """Needs of every deployment, in the order data flows, the ingress last; ``least``: scaled down as far as can be."""
    return (*(_need(d.name, d.derived, least) for d in app.deployments), _need("ingress", app.ingress.derived, least))


def _need(name: str, derived: ServeOptions, least: bool) -> Need:
    each = {"CPU": derived.num_cpus, **derived.resources}
    if derived.num_gpus:
        each["GPU"] = derived.num_gpus
    actor = derived.serve["ray_actor_options"]
    if "memory" in actor:
        each["memory"] = actor["memory"]
    if "accelerator_type" in actor:
        each[f"accelerator_type:{actor['accelerator_type']}"] = 0.001  # Ray's own marker for "a node that has one"
    per_node = derived.serve.get("max_replicas_per_node")
    replicas = derived.min_replicas if least else derived.num_replicas
    return Need(name, replicas, each, actor.get("label_selector", {}), per_node)


def live_nodes() -> tuple[Node, ...]:
    """The nodes of the cluster this process is connected to, with everything they have."""
    return tuple(Node(_name(n), n["Resources"], n["Labels"]) for n in ray.nodes() if n["Alive"])


def free_nodes() -> tuple[Node, ...]:
    """The same nodes with what nobody has taken."""
    free = available_resources_per_node()
    return tuple(Node(_name(n), free.get(n["NodeID"], {}), n["Labels"]) for n in ray.nodes() if n["Alive"])


def held_back(need: Need) -> int:
    """How many actors and placement groups of just these resources wait for a node; Ray counts actors once a second.

    One that has got its resources is not among them, though nobody else sees that until its process runs.
    """
    demands = get_cluster_status(ray.get_runtime_context().gcs_address).resource_demands
    waiting = (*demands.ray_task_actor_demand, *demands.placement_group_demand)
    return sum(some.count for each in waiting for some in each.bundles_by_count if _asks(some.bundle, need))


def _asks(bundle: Mapping[str, float], need: Need) -> bool:
    """Whether it is of the need's resources; Ray rounds them, and limits replicas per node by one of its own."""
    asked = {name: amount for name, amount in bundle.items() if not name.startswith(IMPLICIT_RESOURCE_PREFIX)}
    wanted = {name: amount for name, amount in need.each.items() if amount}
    return asked.keys() == wanted.keys() and all(
        math.isclose(asked[name], amount, abs_tol=1e-4) for name, amount in wanted.items()
    )


def _name(node: Mapping[str, str]) -> str:
    return f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})"


def place(wanted: Iterable[Need], nodes: Iterable[Node]) -> tuple[Fit, ...]:
    """Give every replica a node: the hardest to place first, each where least is left over.

    Ray decides for itself, one replica at a time; where nearly everything is taken it may find a place or miss one
    that this finds.
    """
    wanted, rooms = tuple(wanted), [_Room(node) for node in nodes]
    found: dict[str, Fit] = {}
    hardest = sorted(wanted, key=lambda n: (-n.each.get("GPU", 0), -len(n.labels), -n.each.get("CPU", 0)))
    for need in hardest:
        placed, missing = 0, ""
        while placed < need.replicas and not missing:
            takers = [room for room in rooms if not room.lacks(need)]
            if takers:
                min(takers, key=lambda room: (room.left.get("GPU", 0), room.left.get("CPU", 0))).take(need)
                placed += 1
            else:
                missing = _why(need, rooms)
        found[need.deployment] = Fit(need, placed, missing)
    return tuple(found[need.deployment] for need in wanted)


class _Room:
    """What is left of a node. Ray never splits one replica's part of a GPU over two devices."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.left = dict(node.resources)
        gpus = node.resources.get("GPU", 0)
        self._devices = [1.0] * int(gpus) + [gpus - int(gpus)]
        self._holds: Counter[str] = Counter()

    def admits(self, need: Need) -> bool:
        """Whether the node's labels match the selector."""
        return all(_matches(wanted, self.node.labels.get(key)) for key, wanted in need.labels.items())

    def lacks(self, need: Need) -> list[str]:
        """What keeps one more replica away; empty if it fits."""
        if not self.admits(need):
            return ["the labels"]
        out = [
            f"{amount_of(name, self.left.get(name, 0))} left"
            for name, amount in need.each.items()
            if self.left.get(name, 0) < amount - _ROUNDING
        ]
        gpus = need.each.get("GPU", 0)
        if not out and gpus and len(self._chosen(gpus)) < max(1, gpus):
            out.append(f"no single GPU with {gpus:g} left")
        if need.per_node is not None and self._holds[need.deployment] >= need.per_node:
            out.append(f"{need.per_node} of them, the most that a node may hold")
        return out

    def take(self, need: Need) -> None:
        """Put a replica here."""
        for name, amount in need.each.items():
            self.left[name] -= amount
        gpus = need.each.get("GPU", 0)
        for index in self._chosen(gpus) if gpus else ():
            self._devices[index] -= min(1, gpus)
        self._holds[need.deployment] += 1

    def _chosen(self, gpus: float) -> list[int]:
        """Devices for one replica: whole ones, or the fullest that still has the fraction."""
        fitting = [i for i, left in enumerate(self._devices) if left >= min(1, gpus) - _ROUNDING]
        return sorted(fitting, key=lambda i: self._devices[i])[: max(1, int(gpus))]


def _matches(wanted: str, value: str | None) -> bool:
    """Ray's label selectors: ``v``, ``!v``, ``in(v, w)``, ``!in(v, w)``."""
    positive = wanted.removeprefix("!")
    names = positive.removeprefix("in(").removesuffix(")").split(",") if positive.startswith("in(") else [positive]
    return (value in [name.strip() for name in names]) != wanted.startswith("!")


def _why(need: Need, rooms: list[_Room]) -> str:
    allowed = [room for room in rooms if room.admits(need)]
    if not allowed:
        return f"no node has the labels {', '.join(f'{key}={value}' for key, value in need.labels.items())}"
    for name, amount in need.each.items():
        most = max(room.node.resources.get(name, 0) for room in allowed)
        if most < amount - _ROUNDING:
            return f"no node offers {amount_of(name, amount)}, the most is {amount_of(name, most)}"
    nearest = min(allowed, key=lambda room: len(room.lacks(need)))
    return f"node {nearest.node.name} comes nearest and has {', '.join(nearest.lacks(need))}"


def amount_of(resource: str, amount: float) -> str:
    """``2 GPU``, ``8 GiB memory``."""
    return f"{amount / 2**30:.3g} GiB {resource}" if resource.endswith("memory") else f"{amount:g} {resource}"


def asked_for(need: Need) -> str:
    """One replica's resources and labels, for messages."""
    each = " + ".join(amount_of(name, amount) for name, amount in need.each.items())
    on = f" on a node with {', '.join(f'{k}={v}' for k, v in need.labels.items())}" if need.labels else ""
    return each + on


def check_fits(app: ResolvedApp, nodes: Iterable[Node], *, least: bool = False) -> None:
    """Refuse an application that ``nodes`` cannot hold; ``least``: scaled down as far as can be.

    Raises:
        ConfigError: naming each deployment that does not fit, what it needs and what is missing; Serve itself would
            wait for ever.
    """
    problems = [
        f"{fit.need.deployment} needs {asked_for(fit.need)} for each of {fit.need.replicas} replicas; {fit.placed} of "
        f"them fit beside the other deployments: {fit.missing}"
        for fit in place(needs(app, least=least), nodes)
        if fit.missing
    ]
    if problems:
        raise ConfigError(problems)
