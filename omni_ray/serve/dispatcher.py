"""The ingress's view of the graph: admit a request, open the trunk, retry once on replica death, stream its outputs."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager

from pydantic import BaseModel
from ray.serve.handle import DeploymentHandle

from omni_ray.config.deploy import ObserveConfig, StreamingConfig
from omni_ray.config.ingress import IngressConfig
from omni_ray.config.pipeline import OutputKind, PipelineConfig, RequestPart
from omni_ray.engine.types import Clip, Request
from omni_ray.errors import NotReadyError, ReplicaDiedError, SaturatedError, StageSilentError, StageTimeoutError
from omni_ray.registry import extras_for
from omni_ray.serve.attempts import Attempts, Patience, Tenants
from omni_ray.serve.events import Envelope, Event, Opened, OutputEvent
from omni_ray.serve.latents import store_clips
from omni_ray.serve.lifeline import LifelineHost
from omni_ray.serve.logs import log_content
from omni_ray.serve.meters import IngressMeters, Labels
from omni_ray.serve.planner import Plan, make_plan
from omni_ray.serve.readiness import Pings, Readiness
from omni_ray.serve.ref_collector import RefCollector
from omni_ray.serve.stage_client import StageClient
from omni_ray.serve.tracing import RunTrace, Tracing
from omni_ray.serve.watch import Watch

logger = logging.getLogger("ray.serve")

FIRST_PING_S = 3.0
"""How long a request waits for an application that has never been ready before it is answered 503."""
COME_AGAIN_S = 5
"""``Retry-After`` of a request that waited for a stage in vain."""
STREAM_MARGIN_S = 20.0
"""A stream ends this long after ``max_audio_seconds`` at the latest: within a leaving replica's grace."""


class Dispatcher:
    """Sends requests into the graph. One per ingress replica; keeps nothing of a request when it is over.

    Attributes:
        pipeline, config: what is served and the ingress's limits.
        model_name: the model id that clients use.
        extras: extra request fields of this pipeline's models.
        max_audio_seconds, max_input_audio_seconds: limits in force.
    """

    def __init__(
        self,
        pipeline: PipelineConfig,
        config: IngressConfig,
        streaming: StreamingConfig,
        observe: ObserveConfig,
        model_name: str,
        handles: Mapping[str, DeploymentHandle],
        lifelines: LifelineHost,
        labels: Labels,
    ) -> None:
        self.pipeline = pipeline
        self.config = config
        self.model_name = model_name
        self.extras: Mapping[str, type[BaseModel]] = extras_for(pipeline)
        self.max_audio_seconds = config.longest_speech_s(pipeline)
        self.max_input_audio_seconds = config.max_input_audio_seconds or pipeline.max_input_audio_seconds
        self._streaming = streaming
        self._lifelines = lifelines
        self._clients = {
            name: StageClient(name, handle, labels, streaming, self._lifelines) for name, handle in handles.items()
        }
        self._meters = IngressMeters(labels)
        self._tracing = Tracing(labels) if observe.tracing else None
        self._log_content = observe.log_content
        self._active = 0
        self._leaving = False
        self._tenants = Tenants()
        self._collector = RefCollector()
        self._pings = Pings(self._clients, lambda ready: self._meters.now(self._active, ready))

    @property
    def active(self) -> int:
        """Requests alive right now."""
        return self._active

    def plan(self, outputs: Collection[OutputKind], parts: Collection[RequestPart]) -> Plan:
        """See ``planner.make_plan``."""
        return make_plan(self.pipeline, outputs, parts)

    @contextmanager
    def admitted(self, kept: int = 0) -> Iterator[None]:
        """Hold one of ``max_concurrent_requests`` places, from before the body is read until the answer is over.

        Args:
            kept: so many of the places are not for this request.

        Raises:
            NotReadyError: after ``leave``.
            SaturatedError: all others are taken.
        """
        if self._leaving:
            raise NotReadyError("this server is stopping: it ends what it has begun, and begins nothing more")
        if self._active >= self.config.max_concurrent_requests - kept:
            raise SaturatedError(f"this server already works on {self._active} requests")
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1

    async def stream(
        self,
        request: Request,
        plan: Plan,
        clips: Sequence[Clip] = (),
        traceparent: str | None = None,
        waited_s: float = 0.0,
    ) -> AsyncGenerator[OutputEvent, None]:
        """Outputs of the plan's final stages, as they come; a replica that dies is survived as ``Attempts`` says.

        Args:
            request: what is asked for.
            plan: of ``plan``.
            clips: the request's media.
            traceparent: W3C trace context, or None.
            waited_s: what the client has already waited for another ingress replica; counts as ``recovery_wait_s``.

        Raises:
            NotReadyError: a stage that it needs was never up yet, or is not back in time; nothing was shown.
            SaturatedError: a stage is full; nothing was started.
            StageFailedError: and its kinds, at any time.
        """
        silence = max(self._streaming.first_chunk_timeout_s, self._streaming.idle_timeout_s)
        recovery = self.config.recovery_wait_s
        patience = Patience(silence + recovery, spent_s=min(waited_s, recovery))
        await self._up(plan.names(), recovery - patience.spent_s)
        patience.spend()
        if self._log_content:
            log_content(request)
        watch = Watch()
        stored = await store_clips(clips, self._streaming.inline_bytes)
        trace = self._tracing.begin(*request.key, traceparent) if self._tracing is not None else None
        if trace is not None:
            traceparent = trace.traceparent
        envelope = Envelope(request, plan, stored, traceparent)
        attempts = Attempts(self.config, self._tenants, envelope, patience)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.max_audio_seconds + STREAM_MARGIN_S
        complete = False
        outcome = "cancelled"
        try:
            while not complete:
                began = loop.time()
                try:
                    async with aclosing(self._attempt(attempts, deadline, trace)) as events:
                        async for event in events:
                            if (new := attempts.take(event)) is not None:
                                watch.output(new.output)
                                yield new
                    complete, outcome = True, "finished"
                except (ReplicaDiedError, StageTimeoutError) as error:
                    if not attempts.unfinished:  # only the stream's end is lost; nothing is left to be made
                        outcome = "finished"
                        break
                    if loop.time() > deadline:
                        raise
                    await self._again(attempts, error, began)
                    self._meters.retried("takeover" if attempts.envelope.resume else "retry")
                except SaturatedError as error:
                    await attempts.wait(error)
        except Exception:
            outcome = "failed"
            raise
        finally:
            attempts.close()
            self._meters.stream_ended(watch)
            if trace is not None:
                trace.end(watch, outcome)
            if envelope.holds_refs() and not complete:
                self._collector.soon()

    def started(self) -> None:
        """The replica is about to take requests: what exists now is there to stay."""
        self._collector.freeze()

    def request_ended(self, route: str, outcome: str, seconds: float) -> None:
        """An HTTP request is over; see ``monitoring.metrics.REQUESTS``."""
        self._meters.request_ended(route, outcome, seconds)

    async def _up(self, stages: Collection[str], recovery_wait_s: float) -> None:
        """Return when each of ``stages`` has answered this ingress replica once.

        A new replica of a running application knows within moments. Later a stage may lose all its replicas again: then
        the call to it waits in Serve's router.

        Raises:
            NotReadyError: one of them does not answer, after ``recovery_wait_s`` if it was up before, else soon.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        while waiting := self._pings.unmet(stages):
            was_up = self._pings.was_ready
            limit = max(FIRST_PING_S, recovery_wait_s) if was_up else FIRST_PING_S
            if (left := began + limit - loop.time()) <= 0:
                said = "waiting for" if was_up else "starting: waiting for"
                raise NotReadyError(f"{said} {', '.join(waiting)}", retry_after_s=COME_AGAIN_S)
            await self._pings.news(left)

    async def _again(self, attempts: Attempts, error: ReplicaDiedError | StageTimeoutError, began: float) -> None:
        """Prepare another attempt, after one that ``began`` then (the loop's time) and ended with ``error``.

        A silence before the first event may be that of a long queue, which another attempt would only lengthen; but
        not if a stage has left a ping unanswered meanwhile, and least if it still does.

        Raises:
            NotReadyError: there is none: nothing was shown, and a stage does not come back.
            ReplicaDiedError, StageTimeoutError: there is none; see ``Attempts.again``.
        """
        stages = attempts.envelope.plan.names()
        if not isinstance(error, ReplicaDiedError | StageSilentError):
            waiting = [name for name in stages if name in self._pings.readiness.waiting]
            if waiting and self.config.retry and not attempts.shown:
                await attempts.wait(NotReadyError(f"waiting for {', '.join(waiting)}", retry_after_s=COME_AGAIN_S))
                return
            if not self._pings.missed(stages, began):
                raise error
        attempts.again(error)

    async def _attempt(
        self, attempts: Attempts, deadline: float, trace: RunTrace | None
    ) -> AsyncGenerator[Event, None]:
        """Events of one attempt."""
        loop = asyncio.get_running_loop()
        envelope, patience = attempts.envelope, attempts.patience
        async with aclosing(self._clients[envelope.plan.trunk].stream(envelope, trace)) as stream:
            while True:
                try:
                    async with asyncio.timeout(patience.left_s):
                        received = await anext(stream)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    raise StageTimeoutError(f"nothing came for {patience.seconds:g} s in all its attempts") from None
                if loop.time() > deadline:
                    raise StageTimeoutError(
                        f"the answer took longer than {self.max_audio_seconds:g} s, the longest stream allowed here"
                    )
                yield received.event
                if not isinstance(received.event, Opened):
                    patience.renew()  # only now: a slow reader is no silence

    def leave(self) -> None:
        """Admit nothing from here on, and be ready no more; what runs goes on."""
        self._leaving = True

    async def readiness(self) -> Readiness:
        """The answer of the last round of pings, at most a few seconds old."""
        if self._leaving:
            return Readiness(False, {"ingress": "is stopping"})
        return self._pings.readiness

    async def stop(self) -> None:
        """End the background task and close the lifeline socket."""
        self._pings.stop()
        await self._lifelines.stop()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.stop)
