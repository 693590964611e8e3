"""The deployment that runs a stage: one streaming method, and what Ray Serve asks of a replica."""

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from omni_ray.plugins import load_plugins
from omni_ray.serve.events import Caller, Envelope, Event
from omni_ray.serve.lifeline import LifelineHost
from omni_ray.serve.logs import log_as, log_request
from omni_ray.serve.meters import Labels
from omni_ray.serve.ref_collector import RefCollector
from omni_ray.serve.running_stage import RunningStage, StageState
from omni_ray.serve.serve_options import check_actual_options
from omni_ray.serve.specs import StageSpec
from omni_ray.serve.stage_client import StageClient


class Stage:
    """One stage of a pipeline. Names no other stage: whom it calls comes with each request's plan."""

    async def __init__(self, spec: StageSpec, upstream: Mapping[str, DeploymentHandle]) -> None:  # type: ignore[misc]
        self._stage: RunningStage | None = None
        self._was_ready = False
        load_plugins()
        context = serve.get_replica_context()
        labels = Labels(context.app_name, spec.pipeline.name, spec.stage, context.replica_tag)
        log_as(spec.pipeline.name, spec.stage)
        check_actual_options(spec.stage, spec.derived)
        self._lifelines = LifelineHost(ray.util.get_node_ip_address())
        collector = RefCollector()
        clients = {
            name: StageClient(name, handle, labels, spec.streaming, self._lifelines)
            for name, handle in upstream.items()
        }
        self._stage = await RunningStage.start(spec, labels, clients, spec.derived.tuning, collector)
        collector.freeze()

    @property
    def _running(self) -> RunningStage:
        assert self._stage is not None
        return self._stage

    async def run(self, envelope: Envelope, caller: Caller) -> AsyncIterator[list[Event]]:
        """See ``RunningStage.run``."""
        log_request(envelope.request.request_id)
        async with aclosing(self._running.run(envelope, caller)) as batches:
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

    async def state(self) -> StageState:
        """Counters right now."""
        return self._running.state()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Ray Serve's hook: what its controller hands to ``SlackPolicy``."""
        return {name: float(value) for name, value in self._running.report()._asdict().items()}

    async def check_health(self) -> None:
        """Ray Serve's health check: the engine's own. Serve replaces a replica that fails it three times in a row."""
        if self._stage is not None:
            await self._stage.check_health()

    async def __del__(self) -> None:
        """Ray Serve's shutdown hook."""
        if self._stage is not None:
            await self._stage.stop()
            await self._lifelines.stop()
