"""A Ray cluster of several raylets on this machine with ``ramp`` on it, and hands that reach inside."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.exceptions import RayActorError
from ray.serve.exceptions import DeploymentUnavailableError

from omni_ray.serve import ingress_loss
from omni_ray.serve.builder import build_application
from omni_ray.serve.ports import free_port
from omni_ray.serve.resolve import AppArgs

APP = "ramp"
STAGES = ("thinker", "talker", "code2wav")
DEPLOYMENTS = (*STAGES, "ingress")
NODE_CPUS = 4


def deploy_config(**talker: Any) -> dict[str, Any]:
    """Two replicas of everything; latents cross as object refs; a hang is noticed within seconds.

    Faults keep a request silent for 20 + 20 s in all, at most: who gives up after 60 s was told before.
    """
    deployment = {"num_replicas": 2, "health_check_period_s": 1, "health_check_timeout_s": 5}
    engine = {"allow_request_faults": True, "stall_s": 4}
    return {
        "stages": {
            "thinker": {"deployment": deployment, "engine": {**engine, "latent_width": 30_000}},
            "talker": {"deployment": deployment, "engine": {**engine, **talker}},
            "code2wav": {"deployment": deployment, "engine": {**engine, "chunk_frames": [1, 4, 8]}},
        },
        "streaming": {"first_chunk_timeout_s": 20, "idle_timeout_s": 20},
        "ingress": {"deployment": deployment, "grace_s": 30, "max_takeovers": 5, "recovery_wait_s": 20},
    }


@dataclass
class RampCluster:
    """The running cluster. ``url`` is where ``ramp`` answers."""

    cluster: Any
    url: str
    workers: list[Any] = field(default_factory=list)

    def deploy(self, config: dict[str, Any], wait: bool = True) -> None:
        """Deploy ``ramp``, or change it while it serves."""
        application = build_application("ramp", AppArgs(deploy_config=config))
        serve.run_many([serve.RunTarget(application, name=APP, route_prefix="/")], wait_for_applications_running=wait)

    def pids(self, deployment: str) -> list[int]:
        """Process ids of a deployment's replicas, on all raylets."""
        title = re.compile(rf"ray::ServeReplica:{APP}:{deployment}(\..*)?")
        return sorted(process.pid for process, name in ours() if title.fullmatch(name))

    def kill(self, title: str) -> None:
        """SIGKILL every process whose title begins so."""
        for process, name in ours():
            if name.startswith(title):
                os.kill(process.pid, signal.SIGKILL)

    def add_worker(self) -> None:
        """One more raylet."""
        self.workers.append(self.cluster.add_node(num_cpus=NODE_CPUS))

    def lose_worker(self) -> None:
        """A raylet and everything on it dies, at once."""
        node = self.workers.pop(0)
        self.signal_worker(node, signal.SIGKILL)  # without it the raylet's children outlive it by seconds
        self.cluster.remove_node(node, allow_graceful=False)

    def signal_worker(self, node: Any, number: int) -> None:
        """Send a signal to a raylet and everything on it."""
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in (raylet, *raylet.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def states(self, stage: str) -> list[Any]:
        """``StageState`` of every replica."""

        def ask() -> list[Any]:
            handle = serve.get_deployment_handle(stage, APP)
            answers = handle.broadcast("state").results(timeout_s=20)
            return [state for answer in answers for state in answer if state.stage == stage]

        with ThreadPoolExecutor(1) as pool:  # Serve refuses to block a running event loop
            return pool.submit(ask).result()

    def at_work(self, patience_s: float = 60) -> int:
        """Requests alive in any stage or engine; dead replicas linger in Serve's tables for a while after a fault."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                states = [state for stage in STAGES for state in self.states(stage)]
            except (RayActorError, DeploymentUnavailableError, TimeoutError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)
            else:
                return sum(s.ongoing + s.engine.running + s.engine.queued for s in states)

    def object_store_bytes(self) -> float:
        """Bytes in use in all object stores."""
        total, free = ray.cluster_resources(), ray.available_resources()
        return float(total["object_store_memory"] - free.get("object_store_memory", 0))


def ours() -> Iterator[tuple[psutil.Process, str]]:
    """Every process that we started, with its title; other clusters of this machine are none of our business."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            yield process, (process.cmdline() or [""])[0]


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll; whether it came true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.1)
    return False


@contextmanager
def ramp_cluster(workers: int, config: dict[str, Any], **head: Any) -> Iterator[RampCluster]:
    """A head (started with ``head`` too) with the proxy, ``workers`` raylets for the rest, ``ramp`` ready on them."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ[ingress_loss.SETTING] = ingress_loss.IMPORT_PATH
    os.environ["MALLOC_ARENA_MAX"] = "2"  # else what 40 threads free lies in pieces in as many heaps (soak.md)
    os.environ.update(RAY_worker_niceness="0")  # else this machine's other processes, clients too, go before replicas
    os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "30"  # a proxy that starts slower than Serve's 5 s is killed
    os.environ["RAY_SERVE_STOP_FAILED_ROLLING_UPDATES"] = "0"  # else three deaths in a roll-out end all repair
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 2,
            "object_store_memory": 300 * 2**20,
            "include_dashboard": False,
            # a node that is silent is dead within 20 s; with Ray's own values it takes up to 65 s
            "_system_config": {"health_check_period_ms": 1000, "health_check_timeout_ms": 3000},
            **head,
        },
    )
    port = free_port()
    running = RampCluster(cluster, f"http://127.0.0.1:{port}")
    try:
        for _ in range(workers):
            running.add_worker()
        ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        running.deploy(config)
        if not wait_until(lambda: httpx.get(f"{running.url}/ready").status_code == 200, 60):
            raise RuntimeError("ramp was not ready within 60 s")
        yield running
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
