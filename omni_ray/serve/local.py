"""``omni-ray serve``: a pipeline in the foreground, on a local Ray cluster or an existing one."""

import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, DeploymentStatus

from omni_ray.config.ingress import GRACE_MARGIN_S
from omni_ray.errors import ConfigError
from omni_ray.registry import import_dotted
from omni_ray.serve import haproxy, ingress_loss
from omni_ray.serve.builder import bind
from omni_ray.serve.cluster import check_fits, join, live_nodes
from omni_ray.serve.resolve import ResolvedApp, app_args, resolve
from omni_ray.serve.starting import http_port, waiting_for
from omni_ray.serve.status import applications, ask

NODE_SETTINGS: Mapping[str, str] = {
    ingress_loss.SETTING: ingress_loss.IMPORT_PATH,
    "MALLOC_ARENA_MAX": "2",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_STOP_FAILED_ROLLING_UPDATES": "0",
}
"""What every node of a cluster should be started with, and why: README.md, "Run it on a cluster"."""

DRAIN_MARGIN_S = 10.0
"""What deleting an application takes beyond its streams' grace."""


def serve_here(
    name: str, given: Mapping[str, str], *, host: str, port: int, address: str | None, start_timeout_s: float
) -> int:
    """Serve until SIGINT or SIGTERM, then let streams finish, until the grace ends or a second signal comes.

    Returns:
        The exit code.

    Raises:
        ConfigError: before anything starts, if the configuration is wrong, the cluster too small, or its route taken.
    """
    app = resolve(name, app_args(given))
    if app.pipeline.prepare and not any(spec.model for spec in app.stages):
        import_dotted(app.pipeline.prepare)(lambda line: print(line, file=sys.stderr, flush=True))
    stop, hurry = threading.Event(), threading.Event()
    # replicas import `graphs` and relative paths from here, as with `serve run`
    os.environ.setdefault("PYTHONPATH", os.getcwd())
    address, scratch = address or os.environ.get("RAY_ADDRESS"), None
    if address:
        join(address, log_to_driver=True)
    else:
        _check_port(host, port)
        scratch = _start_ray(app, host)
    for number in (signal.SIGINT, signal.SIGTERM):  # after ray.init, which installs handlers of its own
        signal.signal(number, lambda *_: (hurry if stop.is_set() else stop).set())
    started = ran = False
    try:
        check_fits(app, live_nodes())
        location = "HeadOnly" if address is None else "EveryNode"
        serve.start(proxy_location=location, http_options={"host": host, "port": port})
        target = serve.RunTarget(bind(app), name=app.pipeline.name, route_prefix="/")
        try:
            serve.run_many([target], wait_for_applications_running=False)
        except RayServeException as error:  # another application of that cluster has the route
            raise ConfigError([str(error)]) from error
        started = True
        if (listens := http_port()) != port:
            print(f"Serve on that cluster answers on port {listens} already, not {port}", file=sys.stderr, flush=True)
        if not _wait(app, start_timeout_s, stop):
            return 1
        ran = True
        if not stop.is_set():
            print(f"{app.pipeline.name} is ready: http://{host}:{listens}/v1  (Ctrl-C stops it)", flush=True)
        stop.wait()
        print("stopping: streams may finish first (again to stop at once)", file=sys.stderr, flush=True)
        return 0
    finally:
        if started:  # Serve gives even a replica that never got a node its grace, for which nobody needs to wait
            _drain(app.pipeline.name, app.ingress.derived.graceful_shutdown_timeout_s if ran else 0, hurry)
        if address is None:  # other applications of somebody's cluster are none of our business
            serve.shutdown()
        ray.shutdown()
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)  # what Ray has just killed may be about to write there


def _check_port(host: str, port: int) -> None:
    """Serve's own proxy would share the port with another one of this user, each getting some of the requests.

    Raises:
        ConfigError: somebody listens there, or nobody can.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except (OSError, OverflowError) as error:
        raise ConfigError([f"--port {port}: nothing can listen there: {error}"]) from error


def _start_ray(app: ResolvedApp, host: str) -> Path | None:
    """A cluster of this machine alone, with the settings that its nodes need; returns HAProxy's folder, if any."""
    settings, scratch = dict(NODE_SETTINGS), None
    if os.environ.get(haproxy.ENABLED) == "1":
        haproxy.check_host(host)
        scratch = Path(tempfile.mkdtemp(prefix="omni", dir="/tmp"))
        longest_s = app.config.ingress.longest_speech_s(app.pipeline)
        settings |= {**haproxy.SETTINGS, **haproxy.settings_here(scratch, longest_s + GRACE_MARGIN_S)}
    for setting, value in settings.items():
        os.environ.setdefault(setting, value)
    # "local": without an address Ray would join whatever cluster was last started here, or wait for its ghost
    ray.init(address="local", log_to_driver=True)
    return scratch


def _drain(name: str, grace_s: float, hurry: threading.Event) -> None:
    """Let streams end, then the application: ``serve.shutdown`` alone ends the proxy at once."""
    deadline = time.monotonic() + grace_s
    if grace_s:
        try:
            _let_streams_end(name, deadline, hurry)
        except Exception as error:  # whatever keeps the ingress from answering: no stream goes on without it
            print(f"the ingress does not answer: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
    serve.delete(name, _blocking=False)
    while name in applications() and time.monotonic() < deadline + DRAIN_MARGIN_S and not hurry.wait(0.2):
        pass


def _let_streams_end(name: str, deadline: float, hurry: threading.Event) -> None:
    """Who comes meanwhile hears that this server stops; of an application that is deleted Serve knows no path (404)."""
    ask("ingress", name, "leave")
    while any(ask("ingress", name, "active")) and time.monotonic() < deadline:
        if hurry.wait(0.2):
            return


def _wait(app: ResolvedApp, timeout_s: float, stop: threading.Event) -> bool:
    """Wait until the application runs, telling what each deployment that does not yet run waits for."""
    name, deadline, said = app.pipeline.name, time.monotonic() + timeout_s, [""]
    while not stop.is_set():
        known = applications().get(name)
        if known is not None and known.status == ApplicationStatus.RUNNING:
            return True
        if known is not None and known.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
            print(f"{name} did not start: {known.message}", file=sys.stderr)
            for deployment, detail in known.deployments.items():
                if detail.status != DeploymentStatus.HEALTHY:
                    print(f"{deployment}: {detail.message}", file=sys.stderr)
            return False
        lines = [] if known is None else waiting_for(app, known)
        if lines and lines != said:
            print(f"starting {name}", *lines, sep="\n  ", file=sys.stderr, flush=True)
            said = lines
        if time.monotonic() > deadline:
            print(f"{name} was not ready within {timeout_s:g} s", *said, sep="\n  ", file=sys.stderr)
            return False
        stop.wait(0.25)
    return True
