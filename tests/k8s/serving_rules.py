"""Our own rules for a RayService that streams speech; each names the failure it prevents."""

import math
from collections.abc import Iterator
from typing import Any

import ray

from omni_ray.serve import haproxy, ingress_loss
from omni_ray.serve.local import NODE_SETTINGS
from tests.k8s.crd_schema import Doc
from tests.k8s.ray_cluster import cluster_of, containers, environment, groups
from tests.k8s.serve_config import resolved_apps

MARGIN_S = 30
"""What every grace leaves beyond the longest stream."""
ELSEWHERE = {ingress_loss.SETTING, "MALLOC_ARENA_MAX"}
"""Settings of a node that no manifest has: what HAProxy does by settings of its own, and what the image sets."""
ON_EVERY_POD = {
    **haproxy.MODE,
    **{name: value for name, value in NODE_SETTINGS.items() if name not in ELSEWHERE},
    **haproxy.SETTINGS,
    haproxy.BINARY: "/opt/omni/bin/omni-ray-haproxy",
}
PROBES = ("livenessProbe", "readinessProbe", "startupProbe")


def check_serving_rules(doc: Doc) -> Iterator[str]:
    """Problems of a RayService whose ``serveConfigV2`` is sound."""
    cluster = cluster_of(doc)
    yield from _graces(doc["spec"], cluster)
    yield from _flags(cluster)
    if cluster.get("rayVersion") != ray.__version__:
        yield f"rayVersion: is {cluster.get('rayVersion')!r}, and the images are made with Ray {ray.__version__}"
    if (cluster.get("headGroupSpec", {}).get("rayStartParams") or {}).get("num-cpus") != "0":
        yield 'head: set rayStartParams.num-cpus to "0", so that no replica runs on the head'
    if doc["spec"].get("excludeHeadPodFromServeSvc") is not True:
        yield "excludeHeadPodFromServeSvc: must be true, or streams through the head die with it"
    if (cluster.get("authOptions") or {}).get("mode") != "token":
        yield "authOptions.mode: must be token; port 8265 runs any code that is sent to it"
    if (cluster.get("gcsFaultToleranceOptions") or {}).get("externalStorageNamespace"):
        yield "externalStorageNamespace: leave it unset, two clusters would share it during an upgrade"
    for name, group in groups(cluster):
        for container in containers(group):
            yield from container_problems(name, group["template"]["spec"], container)
    images = {containers(group)[0].get("image") for _, group in groups(cluster)}
    if len(images) > 1:
        yield f"images: {', '.join(sorted(map(str, images)))}: one for all pods, which send each other pickled objects"


def container_problems(where: str, pod: Doc, container: Doc) -> Iterator[str]:
    """Image, privileges and probes of a container."""
    tag = container.get("image", "").rpartition("/")[2]
    if "@sha256:" not in tag and (":" not in tag or tag.endswith(":latest")):
        yield f"{where}: image {container.get('image')!r} needs a fixed tag or digest: a moved one mixes versions"
    security = {**(pod.get("securityContext") or {}), **(container.get("securityContext") or {})}
    if security.get("runAsNonRoot") is not True or security.get("runAsUser") == 0:
        yield f"{where}: securityContext.runAsNonRoot must be true, and runAsUser not 0"
    if security.get("allowPrivilegeEscalation") is not False or security.get("privileged"):
        yield f"{where}: securityContext.allowPrivilegeEscalation must be false"
    if "ALL" not in (security.get("capabilities") or {}).get("drop", []):
        yield f"{where}: securityContext.capabilities must drop ALL"
    for probe in PROBES:
        if probe in container:
            yield f"{where}: {probe} must be left to KubeRay; a probe of the application on the head never succeeds"
    for port in container.get("ports") or []:
        if port.get("hostPort"):
            yield f"{where}: hostPort {port['hostPort']} blocks the second cluster of an upgrade"
    resources = container.get("resources") or {}
    if not resources.get("limits") or resources.get("limits") != resources.get("requests"):
        yield f"{where}: resources.requests must equal limits; Ray counts the limits, Kubernetes the requests"


def _flags(cluster: Doc) -> Iterator[str]:
    first: dict[str, Any] | None = None
    for name, group in groups(cluster):
        env = environment(containers(group)[0])
        flags = {k: v for k, v in env.items() if k.startswith("RAY_SERVE_")}
        first = flags if first is None else first
        for key in sorted(flags.keys() | first.keys()):
            if flags.get(key) != first.get(key):
                yield f"{name}: {key} is {flags.get(key)!r} and {first.get(key)!r} on the head; it must be equal"
        for key, value in ON_EVERY_POD.items():
            if env.get(key) != value:
                yield f"{name}: {key} must be {value!r}"


def _graces(spec: Doc, cluster: Doc) -> Iterator[str]:
    """Every time limit that would cut a stream, against the longest stream; the numbers are the defaults."""
    longest = max(app.config.ingress.max_audio_seconds or math.inf for app in resolved_apps({"spec": spec}))
    delay = "rayClusterDeletionDelaySeconds"
    limits = [("", delay, spec.get(delay, 60), "the end of the old cluster")]
    for name, group in groups(cluster):
        env, pod = environment(containers(group)[0]), group["template"]["spec"]
        drain = env.get("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", 30)
        limits += [
            (f"{name}: ", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", drain, "the drain of a pod"),
            (
                f"{name}: ", "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S",
                env.get("RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", 120), "a HAProxy reload",
            ),
        ]  # fmt: skip
        kill = pod.get("terminationGracePeriodSeconds", 30)
        if kill <= float(drain if str(drain).isdecimal() else math.inf):
            yield f"{name}: terminationGracePeriodSeconds ({kill}) must be more than the drain's {drain} s"
    for prefix, key, value, cut in limits:
        if not str(value).isdecimal() or int(value) < longest + MARGIN_S:
            yield (
                f"{prefix}{key} ({value}) must be a whole number of at least {longest + MARGIN_S:g} "
                f"(max_audio_seconds + {MARGIN_S}), or {cut} cuts longer streams"
            )
