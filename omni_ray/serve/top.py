"""``omni-ray top``: stages, replicas, streams, queue and slack of the applications on a running cluster."""

import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from statistics import median

import ray

from omni_ray.errors import ConfigError
from omni_ray.serve.cluster import join
from omni_ray.serve.running_stage import StageState
from omni_ray.serve.status import ApplicationView, DeploymentView, applications, ask

_CLEAR = "\033[H\033[2J"
_HEAD = (
    "stage", "replica", "run/places", "queue", "oldest s", "streams", "least slack s", "median", "load",
    "done", "failed", "refused", "cancelled", "refs",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class StageView:
    """One stage: what its replicas say, or why they do not; ``status`` of its deployment in Serve's words."""

    name: str
    status: str
    replicas: tuple[StageState, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class AppView:
    """One application; ``alive`` requests at each ingress replica."""

    name: str
    status: str
    alive: tuple[int, ...]
    stages: tuple[StageView, ...]


def top(application: str | None, address: str | None, once: bool, every_s: float) -> int:
    """Show until interrupted, or once; the exit code.

    Raises:
        ConfigError: no such application, or no cluster.
    """
    if not ray.is_initialized():
        join(address or os.environ.get("RAY_ADDRESS") or "auto", log_to_driver=False)
    while True:
        text = render(look(application))
        if once:
            print(text)
            return 0
        print(f"{_CLEAR if sys.stdout.isatty() else ''}{time.strftime('%H:%M:%S')}  Ctrl-C ends\n\n{text}", flush=True)
        time.sleep(every_s)


def look(application: str | None) -> list[AppView]:
    """Ask every replica for its state, all at once.

    Raises:
        ConfigError: ``application`` does not exist.
    """
    known = applications()
    if application is not None and application not in known:
        raise ConfigError([f"no application {application!r} here; there are: {', '.join(known) or 'none'}"])
    chosen = {name: status for name, status in known.items() if application in (None, name)}
    return [_view(name, status) for name, status in chosen.items()]


def _view(name: str, status: ApplicationView) -> AppView:
    deployments = {known: overview for known, overview in status.deployments.items() if known != "ingress"}
    with ThreadPoolExecutor(len(deployments) + 1) as pool:
        alive = pool.submit(ask, "ingress", name, "active")
        asked = [pool.submit(_stages, known, name, overview) for known, overview in deployments.items()]
        views = tuple(view for future in asked for view in future.result())
        try:
            counts = tuple(alive.result())
        except Exception:  # an application that is starting, or is not ours, has no ingress to ask
            counts = ()
    return AppView(name, status.status.value, counts, views)


def _stages(deployment: str, application: str, overview: DeploymentView) -> list[StageView]:
    """The stages that share the deployment's processes; usually one."""
    try:
        answers: list[list[StageState]] = ask(deployment, application, "state")
    except Exception as error:  # whatever keeps it from answering is what there is to see
        return [StageView(deployment, overview.status.value, (), type(error).__name__)]
    stages: dict[str, list[StageState]] = {}
    for state in chain.from_iterable(answers):
        stages.setdefault(state.stage, []).append(state)
    stages = stages or {deployment: []}
    return [StageView(stage, overview.status.value, tuple(states)) for stage, states in stages.items()]


def render(apps: Sequence[AppView]) -> str:
    """A table for each application."""
    return "\n\n".join(_render(app) for app in apps) or "no application is deployed"


def _render(app: AppView) -> str:
    rows: list[tuple[str, ...]] = [_HEAD]
    notes = []
    for stage in app.stages:
        for state in sorted(stage.replicas, key=lambda state: state.replica):
            rows.append(_row(stage.name, state))
        if stage.problem or stage.status != "HEALTHY":
            said = f": no answer ({stage.problem})" if stage.problem else ""
            notes.append(f"{stage.name} is {stage.status}{said}")
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    lines = [
        "  ".join(
            cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    head = f"{app.name}: {app.status}, {sum(app.alive)} requests alive at {len(app.alive)} ingress replica(s)"
    return "\n".join([head, *lines, *notes])


def _row(stage: str, state: StageState) -> tuple[str, ...]:
    engine = state.engine
    slack = (f"{min(state.leads):.2f}", f"{median(state.leads):.2f}") if state.leads else ("-", "-")
    totals = (state.finished, state.failed, state.refused, state.cancelled, state.held_refs)
    return (
        stage,
        state.replica.rpartition("#")[2],
        f"{engine.running}/{engine.max_num_seqs}",
        str(engine.queued),
        f"{engine.oldest_wait_s:.1f}",
        str(state.ongoing),
        *slack,
        f"{state.load:.2f}",
        *map(str, totals),
    )
