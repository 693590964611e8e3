"""``omni-ray serve``: a pipeline in the foreground, on a local Ray cluster or an existing one."""

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from omni_ray.registry import import_dotted
from omni_ray.serve.builder import bind
from omni_ray.serve.cluster import check_fits, live_nodes
from omni_ray.serve.resolve import app_args, resolve

DRAIN_MARGIN_S = 10.0
"""What deleting an application takes beyond its streams' grace."""


def serve_here(
    name: str, given: Mapping[str, str], *, host: str, port: int, address: str | None, start_timeout_s: float
) -> int:
    """Serve until SIGINT or SIGTERM, then let streams finish, until the grace ends or a second signal comes.

    Returns:
        The exit code.

    Raises:
        ConfigError: before anything starts, if the configuration is wrong or the cluster too small.
    """
    app = resolve(name, app_args(given))
    if app.pipeline.prepare and not any(spec.model for spec in app.stages):
        import_dotted(app.pipeline.prepare)(lambda line: print(line, file=sys.stderr, flush=True))
    stop, hurry = threading.Event(), threading.Event()
    # replicas import `graphs` and relative paths from here, as with `serve run`
    os.environ.setdefault("PYTHONPATH", os.getcwd())
    # "local": without an address Ray would join whatever cluster was last started here, or wait for its ghost
    address = address or os.environ.get("RAY_ADDRESS")
    ray.init(address=address or "local", log_to_driver=True)
    for number in (signal.SIGINT, signal.SIGTERM):  # after ray.init, which installs handlers of its own
        signal.signal(number, lambda *_: (hurry if stop.is_set() else stop).set())
    started = False
    try:
        check_fits(app, live_nodes())
        location = "HeadOnly" if address is None else "EveryNode"
        serve.start(proxy_location=location, http_options={"host": host, "port": port})
        target = serve.RunTarget(bind(app), name=app.pipeline.name, route_prefix="/")
        serve.run_many([target], wait_for_applications_running=False)
        started = True
        if not _wait(app.pipeline.name, start_timeout_s, stop):
            return 1
        if not stop.is_set():
            print(f"{app.pipeline.name} is ready: http://{host}:{port}/v1  (Ctrl-C stops it)", flush=True)
        stop.wait()
        print("stopping: streams may finish first (again to stop at once)", file=sys.stderr, flush=True)
        return 0
    finally:
        if started:
            _drain(app.pipeline.name, app.ingress.derived.graceful_shutdown_timeout_s, hurry)
        if address is None:  # other applications of somebody's cluster are none of our business
            serve.shutdown()
        ray.shutdown()


def _drain(name: str, grace_s: float, hurry: threading.Event) -> None:
    """Delete the application and wait until its streams have ended: ``serve.shutdown`` alone ends the proxy at once."""
    serve.delete(name, _blocking=False)
    deadline = time.monotonic() + grace_s + DRAIN_MARGIN_S
    while name in serve.status().applications and time.monotonic() < deadline and not hurry.wait(0.2):
        pass


def _wait(name: str, timeout_s: float, stop: threading.Event) -> bool:
    """Wait until the application runs, telling which deployments are still starting."""
    deadline, said = time.monotonic() + timeout_s, ""
    while not stop.is_set():
        status = serve.status().applications.get(name)
        if status is not None and status.status == ApplicationStatus.RUNNING:
            return True
        if status is not None and status.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
            print(f"{name} did not start: {status.message}", file=sys.stderr)
            for deployment, detail in status.deployments.items():
                if detail.status.value != "HEALTHY":
                    print(f"{deployment}: {detail.message}", file=sys.stderr)
            return False
        waiting = [] if status is None else [n for n, d in status.deployments.items() if d.status.value != "HEALTHY"]
        line = f"starting {name}: waiting for {', '.join(waiting)}" if waiting else said
        if line != said:
            print(line, file=sys.stderr, flush=True)
            said = line
        if time.monotonic() > deadline:
            print(f"{name} was not ready within {timeout_s:g} s; {line}", file=sys.stderr)
            return False
        stop.wait(0.25)
    return True
