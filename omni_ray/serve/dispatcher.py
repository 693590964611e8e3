"""The ingress's view of the graph: admit a request, open the trunk, retry once on replica death, stream its outputs."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from dataclasses import dataclass

from pydantic import BaseModel
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ServeStatus

from omni_ray.config.deploy import ObserveConfig, StreamingConfig
from omni_ray.config.ingress import IngressConfig
from omni_ray.config.pipeline import OutputKind, PipelineConfig, RequestPart
from omni_ray.engine.types import Clip, Request
from omni_ray.errors import NotReadyError, ReplicaDiedError, SaturatedError, StageSilentError, StageTimeoutError
from omni_ray.registry import extras_for
from omni_ray.serve.attempts import Attempts, Tenants
from omni_ray.serve.events import Envelope, Event, OutputEvent
from omni_ray.serve.latents import store_clips
from omni_ray.serve.lifeline import LifelineHost
from omni_ray.serve.logs import log_content
from omni_ray.serve.meters import IngressMeters, Labels
from omni_ray.serve.planner import Plan, make_plan
from omni_ray.serve.ref_collector import RefCollector
from omni_ray.serve.stage_client import StageClient
from omni_ray.serve.tracing import RunTrace, Tracing
from omni_ray.serve.watch import Watch

logger = logging.getLogger("ray.serve")

PING_TIMEOUT_S = 1.0
PING_EVERY_S = 2.0
FIRST_PING_S = 3.0
"""How long a request waits for an application that has never been ready before it is answered 503."""
STREAM_MARGIN_S = 20.0
"""A stream ends this long after ``max_audio_seconds`` at the latest: within a leaving replica's grace."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether every stage answers; ``waiting`` maps each stage that does not to the reason."""

    ready: bool
    waiting: Mapping[str, str]


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
        host: str,
        labels: Labels,
    ) -> None:
        self.pipeline = pipeline
        self.config = config
        self.model_name = model_name
        self.extras: Mapping[str, type[BaseModel]] = extras_for(pipeline)
        self.max_audio_seconds = config.max_audio_seconds or pipeline.max_audio_seconds
        self.max_input_audio_seconds = config.max_input_audio_seconds or pipeline.max_input_audio_seconds
        self._streaming = streaming
        self._lifelines = LifelineHost(host)
        self._clients = {
            name: StageClient(name, handle, labels, streaming, self._lifelines) for name, handle in handles.items()
        }
        self._meters = IngressMeters(labels)
        self._tracing = Tracing(labels) if observe.tracing else None
        self._log_content = observe.log_content
        self._readiness = Readiness(False, {name: "not asked yet" for name in handles})
        self._was_ready = asyncio.Event()
        self._active = 0
        self._tenants = Tenants()
        self._collector = RefCollector()
        self._status: asyncio.Future[ServeStatus] | None = None
        self._status_thread = ThreadPoolExecutor(1, thread_name_prefix="serve-status")
        self._watch = asyncio.get_running_loop().create_task(self._keep_asking())

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
            SaturatedError: all others are taken.
        """
        if self._active >= self.config.max_concurrent_requests - kept:
            raise SaturatedError(f"this server already works on {self._active} requests")
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1

    async def stream(
        self, request: Request, plan: Plan, clips: Sequence[Clip] = (), traceparent: str | None = None
    ) -> AsyncGenerator[OutputEvent, None]:
        """Outputs of the plan's final stages, as they come; a replica that dies is survived as ``Attempts`` says.

        Raises:
            NotReadyError: the application has never been ready yet; nothing was started.
            SaturatedError: a stage is full; nothing was started.
            StageFailedError: and its kinds, at any time.
        """
        await self._started()
        if self._log_content:
            log_content(request)
        watch = Watch()
        stored = await store_clips(clips, self._streaming.inline_bytes)
        trace = self._tracing.begin(*request.key, traceparent) if self._tracing is not None else None
        if trace is not None:
            traceparent = trace.traceparent
        envelope = Envelope(request, plan, stored, traceparent)
        attempts = Attempts(self.config, self._tenants, envelope, self._streaming.first_chunk_timeout_s)
        deadline = asyncio.get_running_loop().time() + self.max_audio_seconds + STREAM_MARGIN_S
        complete = False
        outcome = "cancelled"
        try:
            while not complete:
                try:
                    async with aclosing(self._attempt(attempts.envelope, deadline, trace)) as events:
                        async for event in events:
                            if (new := attempts.take(event)) is not None:
                                watch.output(new.output)
                                yield new
                    complete, outcome = True, "finished"
                except (ReplicaDiedError, StageSilentError) as error:
                    if not attempts.unfinished:  # only the stream's end is lost; nothing is left to be made
                        outcome = "finished"
                        break
                    attempts.again(error)
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

    def request_ended(self, route: str, outcome: str, seconds: float) -> None:
        """An HTTP request is over; see ``monitoring.metrics.REQUESTS``."""
        self._meters.request_ended(route, outcome, seconds)

    async def _started(self) -> None:
        """Let the first round of pings come in: a new ingress replica of a running application knows within moments."""
        try:
            async with asyncio.timeout(FIRST_PING_S):
                await self._was_ready.wait()
        except TimeoutError:
            waiting = ", ".join(self._readiness.waiting)
            raise NotReadyError(f"starting: waiting for {waiting}", retry_after_s=5) from None

    async def _attempt(
        self, envelope: Envelope, deadline: float, trace: RunTrace | None
    ) -> AsyncGenerator[Event, None]:
        """Events of one attempt."""
        loop = asyncio.get_running_loop()
        async with aclosing(self._clients[envelope.plan.trunk].stream(envelope, trace)) as stream:
            async for received in stream:
                if loop.time() > deadline:
                    raise StageTimeoutError(
                        f"the answer took longer than {self.max_audio_seconds:g} s, the longest stream allowed here"
                    )
                yield received.event

    async def readiness(self) -> Readiness:
        """The answer of the last round of pings, at most a few seconds old."""
        return self._readiness

    async def _keep_asking(self) -> None:
        while True:
            try:
                self._readiness = await self._ask()
            except Exception:  # whatever it is: not knowing is not being ready, and the next round may know
                logger.exception("asking the stages failed")
                self._readiness = Readiness(False, {"ingress": "asking the stages failed"})
            if self._readiness.ready:
                self._was_ready.set()
            waiting = self._readiness.waiting
            self._meters.now(self._active, {name: name not in waiting for name in self._clients})
            await asyncio.sleep(PING_EVERY_S if self._was_ready.is_set() else PING_EVERY_S / 8)

    async def _ask(self) -> Readiness:
        answers = await asyncio.gather(
            *(client.ping(PING_TIMEOUT_S) for client in self._clients.values()), return_exceptions=True
        )
        waiting = {name: str(a) for name, a in zip(self._clients, answers, strict=True) if a is not None}
        return Readiness(not waiting, await self._with_status(waiting) if waiting else {})

    async def _with_status(self, waiting: dict[str, str]) -> dict[str, str]:
        """Serve's own words for each stage that does not answer, when the controller can be asked.

        The call blocks for as long as the controller hangs, so it has a thread of its own and is never made twice.
        """
        if self._status is None:
            self._status = asyncio.get_running_loop().run_in_executor(self._status_thread, serve.status)
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                status = await asyncio.shield(self._status)
        except TimeoutError:
            return waiting
        except Exception as error:  # the controller may be gone; that alone never makes us unready
            logger.debug("serve.status did not answer: %r", error)
            self._status = None
            return waiting
        self._status = None
        app = serve.get_replica_context().app_name
        if app not in status.applications:
            return waiting
        known = status.applications[app].deployments
        said = {name: f" ({d.status.value}: {_first_line(d.message)})" for name, d in known.items()}
        return {name: reason + said.get(name, "") for name, reason in waiting.items()}

    async def stop(self) -> None:
        """End the background task and close the lifeline socket."""
        self._watch.cancel()
        self._status_thread.shutdown(wait=False)
        await self._lifelines.stop()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.stop)


def _first_line(message: str) -> str:
    """What went wrong without the traceback, which is for the log."""
    lines = [line for line in message.strip().splitlines() if line.strip()]
    return lines[0][:160] if lines else "no message"
