"""What the KubeRay operator 1.7 refuses after admission, or fails to build; the CRD does not say it."""

import re
from collections.abc import Iterator

from tests.k8s.crd_schema import Doc
from tests.k8s.ray_cluster import cluster_of, containers, environment, groups

_DNS1035 = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MAX_NAME = 47
_REDIS_ENV = {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"}
_STRATEGIES = (None, "None", "NewCluster", "NewClusterWithIncrementalUpgrade")
_ALPHA = {"networkPolicy": "RayClusterNetworkPolicy", "tlsOptions": "RayClusterMTLS"}


def check_operator_rules(doc: Doc) -> Iterator[str]:
    """Problems of a RayService."""
    name, cluster = doc["metadata"]["name"], cluster_of(doc)
    if len(name) > _MAX_NAME or not _DNS1035.fullmatch(name):
        yield f"metadata.name: must be a DNS-1035 label of at most {_MAX_NAME} characters"
    for group_name, group in groups(cluster):
        yield from _group_problems(group_name, group, cluster)
    yield from _head_problems(doc["spec"], cluster)
    for key, gate in _ALPHA.items():
        if key in cluster:
            yield f"{key}: needs the operator's feature gate {gate} (alpha, off by default)"
    if cluster.get("upgradeStrategy"):
        yield "rayClusterConfig.upgradeStrategy must not be set inside a RayService"
    if (cluster.get("authOptions") or {}).get("enableK8sTokenAuth"):
        yield "authOptions.enableK8sTokenAuth is not supported for a RayService"
    yield from _upgrade_problems(doc["spec"].get("upgradeStrategy") or {}, cluster)


def _group_problems(name: str, group: Doc, cluster: Doc) -> Iterator[str]:
    params = group.get("rayStartParams") or {}
    if not containers(group):
        yield f"{name}: needs at least one container"
        return
    if group.get("resources") and params.keys() & {"num-cpus", "num-gpus", "memory", "resources"}:
        yield f"{name}: set resources in rayStartParams or in 'resources', not in both"
    if "labels" in params:
        yield f"{name}: use the 'labels' field, not rayStartParams.labels"
    if group.get("minReplicas", 0) > group.get("maxReplicas", 2**31 - 1):
        yield f"{name}: minReplicas is greater than maxReplicas"
    v2 = _autoscaling(cluster) and (cluster.get("autoscalerOptions") or {}).get("version") == "v2"
    if v2 and group["template"]["spec"].get("restartPolicy", "Never") != "Never":
        yield f"{name}: restartPolicy must be Never or unset with autoscaler v2"
    if not v2 and (group.get("idleTimeoutSeconds") is not None or group.get("priority")):
        yield f"{name}: idleTimeoutSeconds and priority need autoscalerOptions.version: v2"


def _head_problems(spec: Doc, cluster: Doc) -> Iterator[str]:
    head: Doc = cluster.get("headGroupSpec", {})
    first = (containers(head) or [{}])[0]
    redis = environment(first).keys() & _REDIS_ENV
    if redis:
        yield f"head: {', '.join(sorted(redis))} belongs in gcsFaultToleranceOptions, not in env"
    if ((head.get("headService") or {}).get("metadata") or {}).get("name"):
        yield "headGroupSpec.headService.metadata.name must not be set: a second cluster could not start"
    ports = [str(port.get("name")) for port in first.get("ports") or []]
    if ports and not any(p == "serve" or p.startswith("serve-") for p in ports) and not spec.get("serveService"):
        yield "head: a container that lists ports must name one 'serve', or there is no serve Service"


def _upgrade_problems(strategy: Doc, cluster: Doc) -> Iterator[str]:
    kind = strategy.get("type")
    if kind not in _STRATEGIES:
        yield f"upgradeStrategy.type: {kind!r} is not one of {', '.join(s for s in _STRATEGIES if s)}"
    if kind != "NewClusterWithIncrementalUpgrade":
        return
    options = strategy.get("clusterUpgradeOptions") or {}
    surge, step = options.get("maxSurgePercent", 100), options.get("stepSizePercent", -1)
    if not _autoscaling(cluster):
        yield "upgradeStrategy: an incremental upgrade needs enableInTreeAutoscaling: true"
    if not (0 <= step <= surge <= 100 and options.get("intervalSeconds", 0) > 0 and options.get("gatewayClassName")):
        yield (
            "clusterUpgradeOptions: needs 0 <= stepSizePercent <= maxSurgePercent <= 100, intervalSeconds > 0 and "
            "gatewayClassName"
        )


def _autoscaling(cluster: Doc) -> bool:
    return cluster.get("enableInTreeAutoscaling") is True
