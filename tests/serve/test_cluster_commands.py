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
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from omni_ray.models.ramp import oracle
from omni_ray.serve.ports import free_port
from tests.conftest import lose, wait_until
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
        lose(psutil.Process(process.pid))  # asked to stop, it takes half a minute
        process.wait(120)
        shutil.rmtree(scratch, ignore_errors=True)


def done(*words: str, env: dict[str, str], timeout: float = 240) -> subprocess.CompletedProcess[str]:
    """A command that has ended, however it did."""
    command = [str(BIN / words[0]), *words[1:]]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=timeout)


def run(*words: str, env: dict[str, str]) -> str:
    """What a command printed that ended well."""
    ended = done(*words, env=env)
    assert ended.returncode == 0, f"{' '.join(words)}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


HTTP_PORT = free_port()
"""Of the second cluster: Serve keeps the port that it was started with."""


def answers(url: str) -> bool:
    try:
        response = httpx.post(f"{url}/v1/audio/speech", json=speech(model="ramp", voice="alloy"), timeout=10)
    except httpx.HTTPError:
        return False
    if response.status_code == 200:
        assert len(response.headers.get_list("x-request-id")) == 1  # two are one long one to OpenAI's client
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

    A ``deployments:`` block replaces options silently in Serve; our stages refuse to start and name the key. A
    placement group is compared resource by resource: one of the right number of bundles was once good enough.
    """
    from ray.serve.schema import ServeDeploySchema

    built, ours = tmp_path / "built.yaml", tmp_path / "ours.yaml"
    with ThreadPoolExecutor() as pool:
        for each in [
            pool.submit(run, "serve", "build", "graphs.built:ramp", "-o", str(built), env=head),
            pool.submit(run, *BUILD, "-o", str(ours), env=head),
        ]:
            each.result()
    config, apps = {}, []
    for file in (built, ours):
        config = yaml.safe_load(file.read_text())
        ServeDeploySchema.model_validate(config)
        (app,) = config["applications"]
        assert ("deployments" in app) == (file == built)
        app["runtime_env"] = {"env_vars": {"PYTHONPATH": str(ROOT)}}
        apps.append({**app, "name": file.stem, "route_prefix": f"/{file.stem}"})
    config["http_options"] |= {"port": HTTP_PORT, "request_timeout_s": 60}
    config["applications"] = [*apps, overridden(apps[1])]
    ours.write_text(yaml.safe_dump(config))
    run("serve", "deploy", str(ours), "--address", head["RAY_DASHBOARD_ADDRESS"], env=head)
    for app in apps:
        wait_until(lambda url=f"http://127.0.0.1:{HTTP_PORT}{app['route_prefix']}": answers(url), 180)
    logs = Path(head["RAY_TMPDIR"]).glob("ray/session_*/logs/serve/replica_ours_ingress_*.log")
    assert any("http_options.request_timeout_s is 60 s, but one answer may speak" in log.read_text() for log in logs)
    expected = (
        "DEPLOY_FAILED",
        "ray_actor_options.num_cpus",
        "stages.talker",
        "placement_group_bundles[0].CPU = 0.4, but 0.1 was derived",
    )
    wait_until(lambda: all(words in said_of(head, "override") for words in expected), 180)
    deploy(head, {**config, "applications": []})
    wait_until(lambda: not applications(head), 180)


BUILD = ("omni-ray", "build", "ramp", "deploy_config=deploy_configs/ramp.yaml")
SERVE_API = "/api/serve/applications/"


def deploy(head: dict[str, str], config: dict[str, Any]) -> None:
    """What ``serve deploy`` does, without a Python of its own."""
    httpx.put(f"{head['RAY_DASHBOARD_ADDRESS']}{SERVE_API}", json=config, timeout=60).raise_for_status()


def overridden(app: dict[str, Any]) -> dict[str, Any]:
    """``app`` as somebody would change it who does not know where its options come from."""
    once = {"max_constructor_retry_count": 1}
    stages = {
        "talker": {"deployment": once},
        "code2wav": {"deployment": {**once, "ray_actor_options": {"num_gpus": 0.5}}},
    }
    args = {**app["args"], "deploy_config": {**app["args"]["deploy_config"], "stages": stages}}
    deployments = [
        {"name": "talker", "ray_actor_options": {"num_cpus": 0.3}},
        {"name": "code2wav", "placement_group_bundles": [{"CPU": 0.4, "GPU": 0.5}]},
    ]
    return {**app, "name": "override", "route_prefix": "/override", "args": args, "deployments": deployments}


def applications(head: dict[str, str]) -> dict[str, Any]:
    """What ``serve status`` prints, without a Python of its own each time."""
    known: dict[str, Any] = httpx.get(f"{head['RAY_DASHBOARD_ADDRESS']}{SERVE_API}").json()["applications"]
    return known


def said_of(head: dict[str, str], name: str) -> str:
    told = applications(head).get(name, {"status": "", "message": "", "deployments": {}})
    messages = [told["status"], told["message"], *(each["message"] for each in told["deployments"].values())]
    return " ".join(" ".join(messages).split())


@pytest.mark.weights
def test_serve_run_and_a_busy_cluster(head: dict[str, str], tmp_path: Path) -> None:
    """``serve run graphs:ramp key=value`` answers; a wrong argument fails at once and names the right one.

    What fits beside what runs: ``plan`` and the starting lines of ``serve`` say which stage waits for what. Serve keeps
    the port that it was first started with, which ``serve`` once did not know.

    C64: of what no node could ever hold it is said what is needed and what there is, and nothing is waited for.
    """
    hog, grace = tmp_path / "hog.yaml", {"ingress": {"grace_s": 2}}
    hog.write_text(yaml.safe_dump({"stages": {"talker": needing(num_cpus=12)}, **grace}))
    large = {"stages": {name: needing(num_cpus=3.9) for name in ("listener", "thinker", "talker", "code2wav")}, **grace}
    never = json.dumps({"stages": {"talker": needing(num_gpus=2)}})
    with ThreadPoolExecutor() as pool:
        typo = pool.submit(done, "serve", "run", "graphs:ramp", "deploy_confg=x", env=head)
        run("serve", "start", "--http-port", str(HTTP_PORT), env=head)
        bad = typo.result()
        assert bad.returncode != 0
        assert "did you mean 'deploy_config'?" in bad.stderr + bad.stdout
        words = ["serve", "run", "--name", "ramp", "--route-prefix", "/busy", "graphs:ramp", f"deploy_config={hog}"]
        with in_background(*words, env=head) as command:
            url = command.said("is ready at").split("is ready at")[1].split("\x1b")[0].strip().rstrip(".")
            assert url.endswith(f":{HTTP_PORT}/busy")
            wait_until(lambda: answers(url))
            plan, asked = ["voice_chat", f"deploy_config={json.dumps(large)}"], str(free_port())
            own = pool.submit(run, "omni-ray", "plan", "ramp", f"deploy_config={hog}", env=head)
            small = pool.submit(done, "omni-ray", "serve", "ramp", f"deploy_config={never}", "--port", asked, env=head)
            told = done("omni-ray", "plan", *plan, "--json", env=head)
            assert told.returncode == 1
            report = json.loads(told.stdout)["cluster"]
            assert report["nodes"][0]["total"]["CPU"] == 16
            assert report["nodes"][0]["free"]["CPU"] == pytest.approx(3.7)
            fits = {row["deployment"]: (row["now"], row["ever"], row["missing"]) for row in report["deployments"]}
            assert fits["ingress"] == (1, 1, "")
            assert fits["thinker"][:2] == (0, 1)
            assert fits["thinker"][2] == "no node offers 3.9 CPU, the most is 3.7 CPU"
            assert "the application runs there already: RUNNING" in own.result()
            assert small.result().returncode == 2
            assert "talker needs 0.1 CPU + 2 GPU" in small.result().stderr
            late = done("omni-ray", "serve", *plan, "--start-timeout", "4", "--port", asked, env=head)
            assert late.returncode == 1
            assert re.search(rf"Serve on that cluster answers on port \d+ already, not {asked}\n", late.stderr)
            assert "voice_chat was not ready within 4 s" in late.stderr
            waits = "thinker: 0 of 1 replicas run; 1 without a node, needing 3.9 CPU: no node offers 3.9 CPU"
            assert waits in late.stderr
            assert "Traceback" not in late.stderr
            command.process.kill()  # its cluster goes next


def needing(**options: Any) -> dict[str, Any]:
    return {"deployment": {"ray_actor_options": options}}


def test_omni_ray_serve_starts_and_stops() -> None:
    """The command behind ``make serve``: ready line, real answer; on SIGTERM a live stream finishes, then it ends.

    Who comes meanwhile is refused in OpenAI's words; Serve's own for an application that is deleted are 404.

    Two stages take all of something before their processes run. It was once said to be missing: taken by themselves.

    Twice on one machine at once, in both modes. Of HAProxy mode: nothing of it can be reached from elsewhere or steered
    by another user, nothing stays, and the logs, which throughput mode keeps back, come at once.
    """
    seated = needing(resources={"seat": 1})
    apart = {"stages": {"thinker": needing(num_gpus=1), "talker": {**seated, "engine": PACED}}}
    together = {"stages": {"talker": {"engine": PACED}}, "colocate": ["thinker", "talker", "code2wav"]}
    with ThreadPoolExecutor() as pool:
        default, haproxy = pool.submit(starts_and_stops, apart), pool.submit(starts_and_stops, together, "--haproxy")
        told = default.result()
        haproxy.result()
    for stage, taken in (("thinker", "1 GPU"), ("talker", "1 seat")):
        waits = f"{stage}: 0 of 1 replicas run; 1 without a node, needing 0.1 CPU + {taken}"
        assert f"{waits}: a process is being started" in told, told
    assert not re.search("no node|comes nearest", told), told


PACED = {"pace_ms": 40}


def starts_and_stops(config: dict[str, Any], *flags: str) -> str:
    """What the command said until it had answered."""
    port, text = free_port(), " ".join(["word"] * 40)
    env = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_OVERRIDE_RESOURCES": '{"GPU": 1, "seat": 1}'}
    env.pop("RAY_ADDRESS", None)
    deploy_config = json.dumps({**config, "ingress": {"grace_s": 30}})
    words = ["omni-ray", "serve", "ramp", f"deploy_config={deploy_config}", "--port", str(port), *flags]
    with in_background(*words, env=env) as command:
        wait_until(lambda: answers(f"http://127.0.0.1:{port}"), 180)
        told = command.output.read_text()
        found = balancer(command.process.pid, port)
        assert (found is not None) == bool(flags)
        if found is not None:
            addresses, folder = found
            assert addresses == {"127.0.0.1"}
            assert folder.stat().st_mode & 0o077 == 0
        with httpx.stream("POST", f"http://127.0.0.1:{port}/v1/audio/speech", json=speech(text), timeout=60) as stream:
            pieces = stream.iter_raw()
            pcm = next(pieces)
            command.said("POST /v1/audio/speech status=200 outcome=ok")  # of the request before
            command.process.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"http://127.0.0.1:{port}/ready").status_code == 503)
            refused = httpx.post(f"http://127.0.0.1:{port}/v1/audio/speech", json=speech("late"), timeout=60)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert refused.json()["error"]["message"].startswith("this server is stopping")
            assert pcm + b"".join(pieces) == oracle.pcm(text)
        assert command.process.wait(120) == 0
        assert found is None or not found[1].exists()
    return told


def balancer(pid: int, port: int) -> tuple[set[str], Path] | None:
    """Where the HAProxy below ``pid`` that has ``port`` listens, and the folder of its server's files."""
    for process in psutil.Process(pid).children(recursive=True):
        try:
            if process.name() == "haproxy":
                listening = [c.laddr for c in process.net_connections() if c.status == psutil.CONN_LISTEN]
                (config,) = (Path(word) for word in process.cmdline() if word.endswith("/haproxy.cfg"))
                if port in [address.port for address in listening]:
                    return {address.ip for address in listening}, config.parents[1]
        except psutil.NoSuchProcess:  # another configuration has just replaced it
            continue
    return None
