"""The parts of a RayService that rules look at."""

import re
from collections.abc import Iterator
from typing import Any

from omni_ray.serve.cluster import Node
from tests.k8s.crd_schema import Doc

_UNITS = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def cluster_of(doc: Doc) -> Doc:
    """Its RayCluster spec."""
    cluster: Doc = doc["spec"]["rayClusterConfig"]
    return cluster


def groups(cluster: Doc) -> Iterator[tuple[str, Doc]]:
    """The head and every worker group, by name."""
    yield "head", cluster.get("headGroupSpec", {})
    for group in cluster.get("workerGroupSpecs") or []:
        yield str(group.get("groupName")), group


def containers(group: Doc) -> list[Doc]:
    """The containers of a group's pods; the first is Ray's."""
    return group.get("template", {}).get("spec", {}).get("containers") or []


def environment(container: Doc) -> dict[str, Any]:
    """Names and values; a value that comes from elsewhere is its source."""
    return {e["name"]: e.get("value", e.get("valueFrom")) for e in container.get("env") or []}


def quantity(text: Any) -> float:
    """``8Gi`` as a number."""
    match = re.fullmatch(r"([0-9.]+)([A-Za-z]*)", str(text))
    assert match is not None, text
    return float(match[1]) * _UNITS[match[2]]


def ray_nodes(cluster: Doc, count: str) -> list[Node]:
    """The Ray nodes that KubeRay makes of the groups: ``count`` is ``minReplicas`` or ``maxReplicas``."""
    nodes = []
    for name, group in groups(cluster):
        limits, params = containers(group)[0]["resources"]["limits"], group.get("rayStartParams") or {}
        resources = {
            "CPU": float(params.get("num-cpus", quantity(limits["cpu"]))),
            "memory": quantity(limits["memory"]) * 0.7,  # Ray's object store takes 30 %
            "GPU": float(params.get("num-gpus", limits.get("nvidia.com/gpu", 0))),
        }
        number = 1 if name == "head" else group[count]
        nodes += [Node(f"{name}-{i}", resources, group.get("labels") or {}) for i in range(number)]
    return nodes
