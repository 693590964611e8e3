"""The only code that calls a stage's handle: one stream per edge, opened, watched, mapped to our errors and cancelled.

It owns the deadlines (first event, idle), the transport (gRPC, or the actor path with a lifeline when refs travel),
the cancellation in ``finally`` (``break`` and ``del`` do not cancel a Serve stream) and the mapping of Ray's errors.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RequestCancelledError
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from omni_ray.config.deploy import StreamingConfig
from omni_ray.errors import (
    NotReadyError,
    OmniRayError,
    ReplicaDiedError,
    SaturatedError,
    StageFailedError,
    StageSilentError,
    StageTimeoutError,
)
from omni_ray.serve.events import Caller, Envelope, Event, OutputEvent, Saturated
from omni_ray.serve.lifeline import ConsumerEnd, Latent, LifelineHost
from omni_ray.serve.meters import EdgeMeters, Labels
from omni_ray.serve.outbox import nbytes_of
from omni_ray.serve.tracing import Hop, RunTrace

logger = logging.getLogger("ray.serve")


def _cancel(response: DeploymentResponseGenerator[Any]) -> None:
    """Serve's ``cancel`` raises again what kept the call from reaching a replica; here it would hide our own error."""
    try:
        response.cancel()
    except Exception as error:
        logger.debug("the call to be cancelled had never begun: %r", error)


@dataclass(frozen=True, slots=True)
class Received:
    """An event, the means to say that its latent was read, and where the time of reading it is recorded."""

    event: Event
    latent: Latent | None
    edge: EdgeMeters

    def read(self) -> None:
        """The latent behind the event's ref, if there is one, was used or is not wanted: the producer may go on."""
        if self.latent is not None:
            self.latent.read()


class StageClient:
    """Opens streams to one stage on behalf of one consumer."""

    def __init__(
        self, stage: str, handle: DeploymentHandle, labels: Labels, streaming: StreamingConfig, lifelines: LifelineHost
    ) -> None:
        self.stage = stage
        self._consumer = labels.stage
        self._edge = EdgeMeters(labels, stage)
        self._streaming = streaming
        self._lifelines = lifelines
        grpc: dict[str, Any] = {"request_serialization": "pickle", "response_serialization": "pickle"}
        self._by_value = handle.options(stream=True, method_name="run", _by_reference=False, **grpc)
        self._by_reference = handle.options(stream=True, method_name="run", _by_reference=True)
        self._ping = handle.options(method_name="ping", _by_reference=False, **grpc)

    async def ping(self, timeout_s: float, was_ready: bool) -> bool:
        """One round trip to any replica; see ``Stage.ping``. Raises our errors."""
        try:
            async with asyncio.timeout(timeout_s):
                return bool(await self._ping.remote(was_ready))
        except TimeoutError:
            raise NotReadyError(f"stage {self.stage} did not answer within {timeout_s:g} s") from None
        except Exception as error:  # every failure of a ping means the same: not ready
            raise NotReadyError(f"stage {self.stage}: {type(error).__name__}") from error

    async def stream(self, envelope: Envelope, trace: RunTrace | None = None) -> AsyncGenerator[Received, None]:
        """Every event of one call of ``run``, one by one; ``trace`` notes each message.

        Raises:
            SaturatedError, NotReadyError, ReplicaDiedError, StageTimeoutError, StageFailedError: see ``errors``.
        """
        by_reference = envelope.plan.stage(self.stage).by_reference or envelope.holds_refs()
        if by_reference:
            async with (
                self._lifelines.open() as end,
                aclosing(self._events(self._by_reference, envelope, end, trace)) as events,
            ):
                async for received in events:
                    yield received
        else:
            async with aclosing(self._events(self._by_value, envelope, None, trace)) as events:
                async for received in events:
                    yield received

    async def _events(
        self, handle: DeploymentHandle, envelope: Envelope, end: ConsumerEnd | None, trace: RunTrace | None
    ) -> AsyncGenerator[Received, None]:
        limit, late = self._streaming.first_chunk_timeout_s, StageTimeoutError
        response = handle.remote(envelope, Caller(self._consumer, end.address if end else None))
        events = response.__aiter__()
        try:
            while True:
                ours: BaseException | None = None
                try:
                    async with asyncio.timeout(limit):
                        batch = await events.__anext__()
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    ours = late(f"stage {self.stage} sent nothing for {limit:g} s")
                except (asyncio.CancelledError, Exception) as error:
                    ours = self._mapped(error)
                    if ours is error:
                        raise
                if ours is not None:
                    raise ours  # outside the handler: chained, cause and context would form a cycle that holds frames
                if end is not None:
                    end.took()
                self._measure(batch, trace)
                for event in batch:
                    if isinstance(event, Saturated):
                        raise SaturatedError(event.message, retry_after_s=event.retry_after_s)
                    ref_bytes = event.ref_bytes if isinstance(event, OutputEvent) else 0
                    latent = end.arrived(ref_bytes) if end is not None and ref_bytes else None
                    yield Received(event, latent, self._edge)
                limit, late = self._streaming.idle_timeout_s, StageSilentError
        finally:
            _cancel(response)

    def _measure(self, batch: list[Event], trace: RunTrace | None) -> None:
        last = batch[-1]
        sent_at = last.sent_at if isinstance(last, OutputEvent) else 0.0
        refs = sum(event.ref_bytes for event in batch if isinstance(event, OutputEvent))
        nbytes = refs + sum(map(nbytes_of, batch))
        self._edge.received(nbytes, sent_at)
        if trace is not None and sent_at:
            trace.hop(Hop(self.stage, sent_at, time.time(), nbytes, len(batch)))

    def _mapped(self, error: BaseException) -> BaseException:
        """Our error for whatever the handle raised."""
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            return error  # we are being cancelled, the stage is not at fault
        cause: BaseException | None = error
        while isinstance(cause, RayTaskError):
            cause = cause.cause
        if isinstance(cause, OmniRayError):
            return cause
        if isinstance(cause, BackPressureError):
            return SaturatedError(f"stage {self.stage} is full")
        if isinstance(cause, DeploymentUnavailableError):
            return NotReadyError(f"stage {self.stage} has no replica")
        if isinstance(cause, RayActorError | ObjectLostError | RequestCancelledError | asyncio.CancelledError):
            return ReplicaDiedError(f"a replica of stage {self.stage} died", stage=self.stage)
        gone = (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
        if isinstance(cause, grpc.RpcError) and cause.code() in gone:
            return ReplicaDiedError(f"a replica of stage {self.stage} went away", stage=self.stage)
        logger.error("stage %s failed in an unforeseen way", self.stage, exc_info=error)
        return StageFailedError(f"stage {self.stage} failed")
