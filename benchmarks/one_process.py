"""A pipeline's stages chained in one process: ``ramp``'s are the baseline of ``overhead.py``.

The engines, processors and stage runs are the ones that Ray Serve runs; only the handles between them are missing.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, nullcontext
from typing import Any

import uvicorn

from omni_ray.config.pipeline import OutputKind, RequestPart
from omni_ray.engine.base import Engine
from omni_ray.engine.types import AudioClip, Request
from omni_ray.serve.api.app import make_app
from omni_ray.serve.events import Envelope, OutputEvent
from omni_ray.serve.latents import store_clips
from omni_ray.serve.meters import EdgeMeters, Labels
from omni_ray.serve.planner import Plan, calls_of, make_plan
from omni_ray.serve.readiness import Readiness
from omni_ray.serve.resolve import AppArgs, ResolvedApp, resolve
from omni_ray.serve.stage_client import Received
from omni_ray.serve.stage_parts import StageParts, start_engine
from omni_ray.serve.stage_run import StageRun


class LocalClient:
    """A ``StageClient`` whose stage lives in this process."""

    def __init__(self, parts: StageParts) -> None:
        self.stage = parts.stage.name
        self._parts = parts
        self._edge = EdgeMeters(Labels("one_process", "ramp", "local", "local"), self.stage)

    async def stream(self, envelope: Envelope, trace: object = None) -> AsyncGenerator[Received, None]:
        run = StageRun(self._parts, envelope, None)
        task = asyncio.create_task(run.go())
        try:
            async for batch in run.outbox.batches():
                for event in batch:
                    yield Received(event, None, self._edge)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class LocalDispatcher:
    """A ``Dispatcher`` over local clients."""

    def __init__(self, app: ResolvedApp, clients: Mapping[str, LocalClient]) -> None:
        self.pipeline, self.config, self.model_name = app.pipeline, app.ingress.config, app.ingress.model_name
        self.extras = {}
        self.max_audio_seconds = app.pipeline.max_audio_seconds
        self.max_input_audio_seconds = app.pipeline.max_input_audio_seconds
        self._clients = clients

    def plan(self, outputs: Collection[OutputKind], parts: Collection[RequestPart]) -> Plan:
        return make_plan(self.pipeline, outputs, parts)

    def admitted(self, kept: int = 0) -> AbstractContextManager[None]:
        return nullcontext()

    async def stream(
        self,
        request: Request,
        plan: Plan,
        clips: Sequence[AudioClip] = (),
        traceparent: str | None = None,
        waited_s: float = 0.0,
    ) -> AsyncGenerator[OutputEvent, None]:
        envelope = Envelope(request, plan, await store_clips(clips, 2**40), traceparent)
        async with aclosing(self._clients[plan.trunk].stream(envelope)) as stream:
            async for received in stream:
                if isinstance(received.event, OutputEvent):
                    yield received.event

    def request_ended(self, route: str, outcome: str, seconds: float) -> None:
        """Nothing is counted here."""

    async def readiness(self) -> Readiness:
        return Readiness(True, {})


def chain(app: ResolvedApp, engines: Mapping[str, Engine]) -> LocalDispatcher:
    """The stages over started engines, by stage."""
    clients: dict[str, LocalClient] = {}
    for spec in app.stages:
        upstream: Any = {name: clients[name] for name in calls_of(app.plans, spec.stage)}
        clients[spec.stage] = LocalClient(StageParts.of(spec, engines[spec.stage], upstream, "local"))
    return LocalDispatcher(app, clients)


async def start(app: ResolvedApp) -> LocalDispatcher:
    return chain(app, {spec.stage: await start_engine(spec, print) for spec in app.stages})


async def main(port: int, config: str) -> None:
    dispatcher = await start(resolve("ramp", AppArgs(deploy_config=config)))
    app = make_app(dispatcher, {})
    await uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning")).serve()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2]))
