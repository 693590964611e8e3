"""What people type: ``serve run``, ``serve deploy``, ``serve build`` and ``omni-ray serve``, each as a process."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import yaml

from omni_ray.models.ramp import oracle
from tests.conftest import free_port, wait_until
from tests.serve.test_ramp import TEXT, speech

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def head() -> Iterator[dict[str, str]]:
    """A second Ray cluster, with a dashboard for the REST API; yields the environment that points at it."""
    gcs, dashboard = free_port(), free_port()
    # Ray notes the newest cluster in its temporary directory; a short path, because sockets live there too
    scratch = tempfile.mkdtemp(prefix="omni", dir="/tmp")
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": scratch}
    command = [
        BIN / "ray", "start", "--head", f"--port={gcs}", f"--dashboard-port={dashboard}", "--num-cpus=16",
        "--num-gpus=1",
        "--include-dashboard=true", f"--dashboard-agent-listen-port={free_port()}", "--disable-usage-stats",
        f"--dashboard-agent-grpc-port={free_port()}", f"--metrics-export-port={free_port()}",
        f"--ray-client-server-port={free_port()}", "--block",
    ]  # fmt: skip
    process = subprocess.Popen(
        [str(c) for c in command], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    agent = f"http://127.0.0.1:{dashboard}"

    def up() -> bool:
        try:
            return httpx.get(f"{agent}/api/version").status_code == 200
        except httpx.HTTPError:
            return False

    try:
        wait_until(up, 120)
        yield {**environment, "RAY_ADDRESS": f"127.0.0.1:{gcs}", "RAY_DASHBOARD_ADDRESS": agent}
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(120)
        shutil.rmtree(scratch, ignore_errors=True)


def run(*words: str, env: dict[str, str], timeout: float = 240) -> str:
    done = subprocess.run(
        [str(BIN / words[0]), *words[1:]], cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


HTTP_PORT = free_port()
"""Of the second cluster: Serve keeps the port that it was started with."""


def answers(url: str) -> bool:
    try:
        response = httpx.post(f"{url}/v1/audio/speech", json=speech(model="ramp", voice="alloy"), timeout=10)
    except httpx.HTTPError:
        return False
    return response.status_code == 200 and response.content == oracle.pcm(TEXT)


@dataclass
class Command:
    """A command that runs, and the file of its output: a pipe that nobody reads would stop it once it is full."""

    process: subprocess.Popen[bytes]
    output: Path

    def said(self, words: str, seconds: float = 240) -> str:
        """The line with ``words``, once it is there."""

        def lines() -> list[str]:
            return [line for line in self.output.read_text(errors="replace").splitlines() if words in line]

        wait_until(lambda: bool(lines()) or self.process.poll() is not None, seconds)
        assert lines(), self.output.read_text(errors="replace")[-3000:]
        return lines()[0]


@contextmanager
def in_background(*words: str, env: dict[str, str]) -> Iterator[Command]:
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "output"
        with output.open("wb") as file:
            process = subprocess.Popen(
                [str(BIN / words[0]), *words[1:]], cwd=ROOT, env=env, stdout=file, stderr=subprocess.STDOUT
            )
        try:
            yield Command(process, output)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                try:
                    process.wait(120)
                except subprocess.TimeoutExpired:
                    process.kill()  # left behind it would take a core for the rest of the session
                    raise


def test_serve_build_and_deploy(head: dict[str, str], tmp_path: Path) -> None:
    """C67: ``serve build graphs.built:x`` and ``omni-ray build x`` validate, deploy and answer.

    C36: the ingress warns that Serve's total timeout, 60 s here, is shorter than the longest speech.
    """
    from ray.serve.schema import ServeDeploySchema

    built, ours = tmp_path / "built.yaml", tmp_path / "ours.yaml"
    run("serve", "build", "graphs.built:ramp", "-o", str(built), env=head)
    run("omni-ray", "build", "ramp", "deploy_config=deploy_configs/ramp.yaml", "-o", str(ours), env=head)
    for file in (ours, built):
        config = yaml.safe_load(file.read_text())
        ServeDeploySchema.model_validate(config)
        assert ("deployments" in config["applications"][0]) == (file == built)
        config["http_options"] |= {"port": HTTP_PORT, "request_timeout_s": 60}
        config["applications"][0]["route_prefix"] = "/"
        config["applications"][0]["runtime_env"] = {"env_vars": {"PYTHONPATH": str(ROOT)}}
        file.write_text(yaml.safe_dump(config))
        run("serve", "deploy", str(file), "--address", head["RAY_DASHBOARD_ADDRESS"], env=head)
        wait_until(lambda: answers(f"http://127.0.0.1:{HTTP_PORT}"), 180)
    logs = Path(head["RAY_TMPDIR"]).glob("ray/session_*/logs/serve/replica_ramp_ingress_*.log")
    assert any("http_options.request_timeout_s is 60 s, but one answer may speak" in log.read_text() for log in logs)


def test_an_override_block_is_refused(head: dict[str, str], tmp_path: Path) -> None:
    """A ``deployments:`` block replaces options silently in Serve; our stages refuse to start and name the key.

    A placement group is compared resource by resource: one of the right number of bundles was once good enough.
    """
    file = tmp_path / "override.yaml"
    run("omni-ray", "build", "ramp", "deploy_config=deploy_configs/ramp.yaml", "-o", str(file), env=head)
    config = yaml.safe_load(file.read_text())
    app = config["applications"][0]
    app["args"]["deploy_config"]["stages"] = {"code2wav": {"deployment": {"ray_actor_options": {"num_gpus": 0.5}}}}
    app["deployments"] = [
        {"name": "talker", "ray_actor_options": {"num_cpus": 0.3}},
        {"name": "code2wav", "placement_group_bundles": [{"CPU": 0.4, "GPU": 0.5}]},
    ]
    app["runtime_env"] = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    app["name"], app["route_prefix"] = "override", "/override"
    del config["http_options"]
    file.write_text(yaml.safe_dump(config))
    run("serve", "deploy", str(file), "--address", head["RAY_DASHBOARD_ADDRESS"], env=head)

    def said() -> str:
        """What ``serve status`` prints, without a Python of its own each time."""
        known = httpx.get(f"{head['RAY_DASHBOARD_ADDRESS']}/api/serve/applications/").json()["applications"]
        told = known.get("override", {"status": "", "message": "", "deployments": {}})
        messages = [told["status"], told["message"], *(each["message"] for each in told["deployments"].values())]
        return " ".join(" ".join(messages).split())

    expected = (
        "DEPLOY_FAILED",
        "ray_actor_options.num_cpus",
        "stages.talker",
        "placement_group_bundles[0].CPU = 0.4, but 0.1 was derived",
    )
    wait_until(lambda: all(words in said() for words in expected), 180)


def test_serve_run(head: dict[str, str]) -> None:
    """``serve run graphs:ramp key=value``; a wrong argument fails at once and names the right one."""
    typo = [str(BIN / "serve"), "run", "graphs:ramp", "deploy_confg=x"]
    bad = subprocess.run(typo, cwd=ROOT, env=head, capture_output=True, text=True, timeout=240)
    assert bad.returncode != 0
    assert "did you mean 'deploy_config'?" in bad.stderr + bad.stdout
    words = ["serve", "run", "--name", "run", "--route-prefix", "/run"]
    words += ["graphs:ramp", "deploy_config=deploy_configs/ramp.yaml"]
    with in_background(*words, env=head) as command:
        url = command.said("is ready at").split("is ready at")[1].split("\x1b")[0].strip().rstrip(".")
        wait_until(lambda: answers(url))


@pytest.mark.weights
def test_a_busy_cluster(head: dict[str, str]) -> None:
    """What fits beside what runs: ``plan`` and the starting lines of ``serve`` say which stage waits for what.

    Serve keeps the port that it was first started with, which ``serve`` once did not know.
    """
    talker = '{"deployment": {"ray_actor_options": {"num_cpus": 12}}}'
    hog = f'deploy_config={{"stages": {{"talker": {talker}}}, "ingress": {{"grace_s": 2}}}}'
    each = {"deployment": {"ray_actor_options": {"num_cpus": 3.9}}}
    stages = dict.fromkeys(("listener", "thinker", "talker", "code2wav"), each)
    large = json.dumps({"stages": stages, "ingress": {"grace_s": 2}})
    run("serve", "start", "--http-port", str(HTTP_PORT), env=head)
    asked = str(free_port())
    words = ["serve", "run", "--name", "ramp", "--route-prefix", "/busy", "graphs:ramp", hog]
    with in_background(*words, env=head) as command:
        command.said("is ready at")
        own = run("omni-ray", "plan", "ramp", hog, env=head)
        assert "the application runs there already: RUNNING" in own
        plan = [str(BIN / "omni-ray"), "plan", "voice_chat", f"deploy_config={large}"]
        done = subprocess.run([*plan, "--json"], cwd=ROOT, env=head, capture_output=True, text=True, timeout=240)
        assert done.returncode == 1
        report = json.loads(done.stdout)["cluster"]
        assert report["nodes"][0]["total"]["CPU"] == 16
        assert report["nodes"][0]["free"]["CPU"] == pytest.approx(3.7)
        fits = {row["deployment"]: (row["now"], row["ever"], row["missing"]) for row in report["deployments"]}
        assert fits["ingress"] == (1, 1, "")
        assert fits["thinker"][:2] == (0, 1)
        assert fits["thinker"][2] == "no node offers 3.9 CPU, the most is 3.7 CPU"
        serve = [str(BIN / "omni-ray"), "serve", *plan[2:], "--start-timeout", "4", "--port", asked]
        done = subprocess.run(serve, cwd=ROOT, env=head, capture_output=True, text=True, timeout=240)
        assert done.returncode == 1
        assert re.search(rf"Serve on that cluster answers on port \d+ already, not {asked}\n", done.stderr)
        assert "voice_chat was not ready within 4 s" in done.stderr
        assert "thinker: 0 of 1 replicas run; 1 without a node, needing 3.9 CPU: no node offers 3.9 CPU" in done.stderr
        assert "Traceback" not in done.stderr


def test_omni_ray_serve_starts_and_stops(tmp_path: Path) -> None:
    """The command behind ``make serve``: ready line, real answer; on SIGTERM a live stream finishes, then it ends."""
    port, text = free_port(), " ".join(["word"] * 40)
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    env.pop("RAY_ADDRESS", None)
    config = '{"stages": {"talker": {"engine": {"pace_ms": 40}}}, "ingress": {"grace_s": 30}}'
    words = ["omni-ray", "serve", "ramp", f"deploy_config={config}", "--port", str(port)]
    with in_background(*words, env=env) as command:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}"), 180)
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/audio/speech", json=speech(text), timeout=60) as stream:
            pieces = stream.iter_raw()
            pcm = next(pieces)
            command.process.send_signal(signal.SIGTERM)
            assert pcm + b"".join(pieces) == oracle.pcm(text)
        assert command.process.wait(120) == 0


def test_too_small_a_cluster_is_said_before_anything_starts() -> None:
    """C64: what is needed, what there is, and no waiting."""
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    env.pop("RAY_ADDRESS", None)
    config = '{"stages": {"talker": {"deployment": {"ray_actor_options": {"num_gpus": 1}}}}}'
    done = subprocess.run(
        [str(BIN / "omni-ray"), "serve", "ramp", f"deploy_config={config}", "--port", str(free_port())],
        cwd=ROOT, env=env, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 2
    assert "talker needs 0.1 CPU + 1 GPU" in done.stderr
