"""``omni-ray plan --address``: what of an application fits a live cluster, what is missing, stage by stage."""

from collections.abc import Mapping
from dataclasses import dataclass

import ray

from omni_ray.serve.cluster import Node, amount_of, free_nodes, join, live_nodes, needs, place
from omni_ray.serve.resolve import ResolvedApp
from omni_ray.serve.status import applications


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node: what it has, what nobody has taken, and its labels."""

    name: str
    total: dict[str, float]
    free: dict[str, float]
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class FitRow:
    """One deployment: replicas that find a node ``now``, and ``ever``: were the cluster empty; why not all do."""

    deployment: str
    replicas: int
    now: int
    ever: int
    missing: str


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """What a live cluster can hold.

    ``running`` is Serve's status of the application there; its own replicas then take part of what is not free.
    """

    address: str
    running: str | None
    nodes: list[NodeRow]
    deployments: list[FitRow]

    @property
    def fits(self) -> bool:
        """Whether a deployment would start: at once, or in place of the application that runs there."""
        return all((row.ever if self.running else row.now) == row.replicas for row in self.deployments)

    def lines(self) -> list[str]:
        """For people."""
        out = ["", f"cluster at {self.address}"]
        for node in self.nodes:
            free = ", ".join(_free(name, node.free.get(name, 0), amount) for name, amount in node.total.items())
            labels = "".join(f", {key}={value}" for key, value in node.labels.items())
            out.append(f"  node {node.name}: free {free}{labels}")
        if self.running:
            out.append(f"  the application runs there already: {self.running}; its replicas are not counted as free")
        for row in self.deployments:
            said = f"  {row.deployment:<12} {row.now} of {row.replicas} replicas fit now"
            if row.now < row.replicas and row.ever == row.replicas:
                said += "; all would, were the cluster empty"
            out.append(said + (f": {row.missing}" if row.missing else ""))
        return out


def cluster_report(app: ResolvedApp, address: str) -> ClusterReport:
    """Ask the cluster at ``address`` and leave it as it is.

    Raises:
        ConfigError: no cluster answers there, or not one of this Ray and Python.
    """
    joined = join(address, log_to_driver=False)
    try:
        total, free = live_nodes(), free_nodes()
        known = applications().get(app.pipeline.name)
        now, ever = place(needs(app), free), place(needs(app), total)
        return ClusterReport(
            address=joined,
            running=known.status.value if known else None,
            nodes=[_node_row(node, left) for node, left in zip(total, free, strict=True)],
            deployments=[
                FitRow(fit.need.deployment, fit.need.replicas, fit.placed, best.placed, best.missing or fit.missing)
                for fit, best in zip(now, ever, strict=True)
            ],
        )
    finally:
        ray.shutdown()


def _free(resource: str, free: float, total: float) -> str:
    if resource == "memory":
        return f"{free / 2**30:.3g} of {amount_of(resource, total)}"
    return f"{free:g} of {amount_of(resource, total)}"


def _node_row(node: Node, free: Node) -> NodeRow:
    def shown(resources: Mapping[str, float]) -> dict[str, float]:
        return {n: a for n, a in resources.items() if not n.startswith(("node:", "object_store_memory"))}

    labels = {key: value for key, value in node.labels.items() if not key.startswith("ray.io/")}
    return NodeRow(node.name, shown(node.resources), shown(free.resources), labels)
