"""The deployment that runs a stage, or several in one process: one streaming method, and what Ray Serve asks for."""

import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from typing import Final

from ray import serve
from ray.serve.handle import DeploymentHandle

from omni_ray.plugins import load_plugins
from omni_ray.serve.events import Caller, Envelope, Event
from omni_ray.serve.local_client import LocalClient
from omni_ray.serve.logs import log_as, log_request
from omni_ray.serve.meters import Labels
from omni_ray.serve.node import lifeline_host
from omni_ray.serve.ref_collector import RefCollector
from omni_ray.serve.running_stage import RunningStage, StageState
from omni_ray.serve.serve_options import check_actual_options
from omni_ray.serve.slack import most_loaded
from omni_ray.serve.specs import DeploymentSpec
from omni_ray.serve.stage_client import Client, StageClient

TURN_S: Final = 0.0005
"""How long a thread may keep the interpreter while another one wants it. By Python's default, 5 ms, the thread that
launches a GPU's next step could wait for longer than the step takes."""


class Stage:
    """Stages of a pipeline. Names no other stage: whom they call comes with each request's plan."""

    async def __init__(  # type: ignore[misc]
        self, spec: DeploymentSpec, upstream: Mapping[str, DeploymentHandle]
    ) -> None:
        """Start every stage, in the order data flows. ``upstream``: the handle of each stage elsewhere, by its name."""
        self._stages: dict[str, RunningStage] = {}
        self._was_ready = False
        load_plugins()
        sys.setswitchinterval(TURN_S)
        context = serve.get_replica_context()
        self._tuning = spec.derived.tuning
        pipeline = spec.stages[-1].pipeline.name
        log_as(pipeline, spec.name)
        check_actual_options(spec.name, spec.derived)
        self._lifelines = lifeline_host()
        collector = RefCollector()
        for stage in spec.stages:
            labels = Labels(context.app_name, pipeline, stage.stage, context.replica_tag)
            clients: dict[str, Client] = {
                name: StageClient(name, handle, labels, stage.streaming, self._lifelines)
                for name, handle in upstream.items()
            }
            for name, running in self._stages.items():
                clients[name] = LocalClient(name, running, labels, stage.streaming)
            self._stages[stage.stage] = await RunningStage.start(stage, labels, clients, self._tuning, collector)
        collector.freeze()

    async def run(self, envelope: Envelope, caller: Caller) -> AsyncIterator[list[Event]]:
        """See ``RunningStage.run``."""
        log_request(envelope.request.request_id)
        async with aclosing(self._stages[caller.stage].run(envelope, caller)) as batches:
            async for batch in batches:
                yield batch

    async def ping(self, was_ready: bool) -> bool:
        """Answering is the point, and a dead engine does not answer (cases.md C09).

        Args:
            was_ready: whether the application has ever been ready, as far as the one who asks knows.

        Returns:
            The same, as far as anybody has told this replica.
        """
        await self.check_health()
        self._was_ready |= was_ready
        return self._was_ready

    async def state(self) -> list[StageState]:
        """Counters right now, of each stage."""
        return [stage.state() for stage in self._stages.values()]

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Ray Serve's hook: what its controller hands to ``SlackPolicy``."""
        report = most_loaded([stage.report() for stage in self._stages.values()], self._tuning)
        return {name: float(value) for name, value in report._asdict().items()}

    async def check_health(self) -> None:
        """Ray Serve's health check: the engines'. Serve replaces a replica that fails it three times in a row."""
        for stage in self._stages.values():
            await stage.check_health()

    async def __del__(self) -> None:
        """Ray Serve's shutdown hook."""
        if not self._stages:
            return
        for stage in reversed(self._stages.values()):
            await stage.stop()
        await self._lifelines.stop()
