"""Fixtures: one Ray cluster per session with its own ports, and applications served on it over HTTP.

``make test`` runs two halves: what starts no Ray, some at once; then what has the mark ``alone``, one by one. Whoever
asks for ``cluster`` (or ``serving``) is marked here; a test whose own command starts Ray needs the mark itself.
"""

import gc
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, settings

from omni_ray.serve.ports import free_port
from tests.clock import virtual_time  # noqa: F401 - a fixture

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ["RAY_AUTH_MODE"] = "disabled"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] = "omni_ray.serve.ingress_loss:middlewares"
os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "200"  # replicas send their spans soon
# Ray's default of 15 leaves replicas 3 % of a core that anything else wants, and nothing of theirs happens in time;
# and Serve kills a proxy that takes more than 5 s to start
os.environ.update(RAY_worker_niceness="0", RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S="60")
os.environ.update(RAY_metrics_report_interval_ms="2000")  # 10 s by default, and tests of metrics wait for several

settings.register_profile("any machine", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell starts what runs in its background so, and the commands under test would inherit it and never stop
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:
    # Ray's directory: in the half that runs beside other tests nothing can start it, and says why
    os.environ["RAY_TMPDIR"] = "/dev/null/only a test with the mark 'alone' may start Ray"


gc.disable()
"""Until all is collected: the collector would look again and again at what is imported, which is no garbage."""


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@cache
def may_start_ray(file: Path) -> bool:
    """Whether its text says so: a test elsewhere gets no mark, so that it fails in the half where Ray cannot start."""
    return re.search(r"mark\.alone\b|\b(Serving|Served|cluster: str)\b", file.read_text()) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The half that starts Ray does not import the files of the other one, which takes ten seconds."""
    starts_ray = config.option.markexpr == "alone"
    return True if starts_ray and collection_path.match("test_*.py") and not may_start_ray(collection_path) else None


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by mark
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and "cluster" in item.fixturenames and may_start_ray(item.path):
            item.add_marker("alone")


MAX_APPS = 3
"""Applications kept alive at once: every replica is a process of some 90 MB."""
STARTED: list[str] = []
"""Applications of this session. Each start takes seconds; tests that share one should stand together."""


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if STARTED:
        terminalreporter.write_line(f"{len(STARTED)} applications were started")


SOON = {"health_check_period_s": 0.5}
"""Of a deployment whose replicas a test kills: how often Serve looks for dead ones; 5 s is our default."""
PATIENCE_S = 60
"""How long tests wait for what takes two seconds on a quiet machine; waiting ends as soon as it is so."""
LONGEST_PAUSE_S = 0.2
"""Between two looks at what is awaited."""


COLLECTOR_PORT = free_port()
"""Where replicas with tracing on send their spans; replicas get it from Ray's processes, which get it from here."""
os.environ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"] = f"http://127.0.0.1:{COLLECTOR_PORT}/v1/traces"


@dataclass(frozen=True)
class Served:
    """An application of a test: where it answers and how to look inside."""

    name: str
    url: str
    deployments: dict[str, str]
    """The deployment that runs each stage."""

    def client(self, timeout: float = 60) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=timeout)

    def async_client(self, timeout: float = 60) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=timeout, limits=limits)

    def states(self, stage: str) -> list[Any]:
        """``StageState`` of every replica; while one is being replaced it is waited for."""
        answers = self._ask_all(self.deployments[stage], "state")
        return [state for answer in answers for state in answer if state.stage == stage]

    def _ask_all(self, deployment: str, method: str) -> list[Any]:
        """Call every replica, again and again while one of them is dead or Serve has none."""
        answers: list[Any] = []

        def all_answer() -> bool:
            answers[:] = self._ask_once(deployment, method) or []
            return bool(answers)

        wait_until(all_answer)
        return answers

    def _ask_once(self, deployment: str, method: str) -> list[Any] | None:
        """Call every replica; None if one is dead or none is there. Dead ones linger in Serve's tables a while.

        From a thread, because Serve refuses to block a running loop.
        """
        from ray import serve
        from ray.exceptions import RayActorError
        from ray.serve.exceptions import DeploymentUnavailableError

        def ask() -> list[Any]:
            handle = serve.get_deployment_handle(deployment, self.name)
            return list(handle.broadcast(method).results(timeout_s=PATIENCE_S))

        with ThreadPoolExecutor(1) as pool:
            try:
                return pool.submit(ask).result()
            except (RayActorError, DeploymentUnavailableError):
                return None

    def ongoing(self) -> dict[str, int]:
        """Requests alive in each stage and the ingress, over all replicas."""
        return {**self.working(), "ingress": sum(self._ask_all("ingress", "active"))}

    def working(self) -> dict[str, int]:
        """The same without the ingress."""
        return {stage: sum(map(alive_in, self.states(stage))) for stage in self.stages()}

    def stages(self) -> list[str]:
        return list(self.deployments)

    def replicas(self) -> dict[str, list[str]]:
        """Replica tags of every stage."""
        return {stage: sorted(s.replica for s in self.states(stage)) for stage in self.stages()}

    def settled(self, stage: str, replicas: int) -> set[str]:
        """Replica tags of ``stage`` once ``replicas`` of them answer."""
        tags: set[str] = set()

        def all_answer() -> bool:
            tags.clear()
            tags.update(state.replica for state in self.states(stage))
            return len(tags) == replicas

        wait_until(all_answer)
        return tags

    def rest(self) -> None:
        """Wait until every deployment has its replicas, all of them answer, and nobody works any more.

        So begins every test: what one test broke, or left behind when it failed, is not the next one's trouble.
        """
        wait_until(self._rests, 2 * PATIENCE_S, every_s=0.2)  # a look costs every process something

    def _rests(self) -> bool:
        from ray.exceptions import RayActorError

        from omni_ray.serve.status import applications

        try:
            deployments = applications()[self.name].deployments
        except RayActorError:  # the controller is being replaced
            return False
        for name in sorted(deployments, key=lambda name: name != "ingress"):  # once it rests, no stage gets more work
            replicas = deployments[name].replicas
            if deployments[name].status != "HEALTHY" or {replica.state for replica in replicas} != {"RUNNING"}:
                return False
            answers = self._ask_once(name, "active" if name == "ingress" else "state")
            if answers is None or len(answers) != len(replicas):
                return False
            if any(answers if name == "ingress" else (alive_in(state) for answer in answers for state in answer)):
                return False
        return httpx.get(f"{self.url}/ready").status_code == 200

    def pids(self, stage: str) -> list[int]:
        """Process ids of the stage's replicas, once there is one; others' clusters on this machine are not asked."""
        import psutil

        # Ray adds ".method" to the title of a process that runs one
        title = re.compile(rf"ray::ServeReplica:{self.name}:{stage}(\..*)?")
        found: list[int] = []

        def some() -> bool:
            found[:] = [p.pid for p in psutil.Process().children(recursive=True) if title.fullmatch(title_of(p))]
            return bool(found)

        wait_until(some)
        return found


def alive_in(state: Any) -> int:
    """Requests that the replica with this ``StageState`` works on."""
    return int(state.ongoing + state.engine.running + state.engine.queued)


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """A Ray cluster of this session alone; yields the base URL of its HTTP proxy."""
    import ray
    from ray import serve

    port = free_port()
    ray.init(
        address="local",
        num_cpus=64,
        resources={"seat": 1, "first_node": 1},
        include_dashboard=False,
        object_store_memory=400 * 2**20,
        log_to_driver=False,
        logging_level="error",
    )
    # one proxy: a second node of this host would want the same port
    serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    ray.shutdown()  # its processes end, and Serve's with them; asked to leave they would take seconds


Serving = Callable[..., Served]


@pytest.fixture(scope="session")
def serving(cluster: str) -> Serving:
    """``serving("ramp", {deploy config})``: that application, started once and shared by all tests that ask for it.

    It is handed out whole and at rest.
    """
    import json

    from ray import serve

    from omni_ray.serve.builder import bind
    from omni_ray.serve.resolve import AppArgs, resolve
    from omni_ray.serve.status import applications

    alive: dict[str, Served] = {}

    def runs(name: str) -> bool:
        found = applications()[name]
        assert found.status != "DEPLOY_FAILED", found.message
        return found.status == "RUNNING"

    def start(pipeline: str, config: dict[str, Any] | None = None) -> Served:
        config = {**(config or {})}
        config["ingress"] = {"grace_s": 2, **config.get("ingress", {})}
        key = json.dumps([pipeline, config], sort_keys=True)
        if key in alive:
            alive[key] = alive.pop(key)
            alive[key].rest()
            return alive[key]
        while len(alive) >= MAX_APPS:
            serve.delete(alive.pop(next(iter(alive))).name, _blocking=False)
        name = f"{pipeline}_{len(STARTED)}"  # never one that is still leaving
        STARTED.append(name)
        app = resolve(pipeline, AppArgs(deploy_config=config))
        target = serve.RunTarget(bind(app), name, f"/{name}")
        # serve.run would look once a second
        serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        wait_until(lambda: runs(name), 4 * PATIENCE_S, every_s=0.2)
        deployments = {stage.stage: d.name for d in app.deployments for stage in d.stages}
        alive[key] = Served(name, f"{cluster}/{name}", deployments)
        alive[key].rest()
        return alive[key]

    return start


def lose(node: Any) -> None:
    """Everything of a Ray node, given as the process that started it, is gone at once."""
    import psutil

    if not node.is_running():
        return
    for process in [node, *node.children(recursive=True)]:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def title_of(process: Any) -> str:
    """The first word of a process's command line; empty if it is gone."""
    import psutil

    try:
        return next(iter(process.cmdline()), "")
    except psutil.Error:
        return ""


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE_S, every_s: float = 0.02) -> float:
    """Poll until ``condition``; returns how long it took, fails after ``seconds``.

    A look at processes or replicas costs as much as it takes: whoever looked all the time would take a core from what
    is awaited.
    """
    started = looked = time.monotonic()
    while not condition():
        ended = time.monotonic()
        assert ended - started < seconds, f"not true within {seconds} s"
        time.sleep(max(every_s, min(4 * (ended - looked), LONGEST_PAUSE_S)))
        looked = time.monotonic()
    return time.monotonic() - started
