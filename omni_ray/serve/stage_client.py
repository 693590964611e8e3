"""The only code that calls a stage's handle: one stream per edge, opened, watched, mapped to our errors and cancelled.

``StageClient`` owns the deadlines (first event, idle), the transport (gRPC, or the actor path with a lifeline when refs
travel), the cancellation in ``finally`` (``break`` and ``del`` do not cancel a Serve stream) and the mapping of Ray's
errors. What it has in common with the client of a stage in the same process (``local_client``) is ``Client``.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError, TaskCancelledError
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
from omni_ray.serve.deadline import Deadline
from omni_ray.serve.events import Caller, Envelope, Event, OutputEvent, Saturated
from omni_ray.serve.lifeline import ConsumerEnd, LifelineHost
from omni_ray.serve.meters import EdgeMeters, Labels
from omni_ray.serve.outbox import nbytes_of
from omni_ray.serve.tracing import Hop, RunTrace

logger = logging.getLogger("ray.serve")

OWN_CANCELLATION_S = 5.0
"""How long a call that was cancelled, but not by us, waits for our own cancellation before it counts as a death.

Serve cancels a request's calls and the task that made them in no order: after a client hung up, the ingress's task has
heard of it up to 0.1 s after its call. A replica that died is told apart: that fails the call with an error of the
actor or of gRPC, never with a cancellation.
"""

_CANCELLED = (asyncio.CancelledError, RequestCancelledError, TaskCancelledError)


def _cause(error: BaseException) -> BaseException | None:
    """What was raised in the replica or in Serve, without Ray's wrapping."""
    cause: BaseException | None = error
    while isinstance(cause, RayTaskError):
        cause = cause.cause
    return cause


def _is_ours(error: BaseException) -> bool:
    """Whether it is the cancellation of the task that runs here."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def _cancel(response: DeploymentResponseGenerator[Any]) -> None:
    """Serve's ``cancel`` raises again what kept the call from reaching a replica; here it would hide our own error."""
    try:
        response.cancel()
    except Exception as error:
        logger.debug("the call to be cancelled had never begun: %r", error)


class Unread(Protocol):
    """A latent that arrived and has yet to be read."""

    def read(self) -> None:
        """It was used, or is not wanted: the producer may go on."""


class ConsumerSide(Protocol):
    """Where a stream's reader reports what it takes and reads."""

    def took(self) -> None:
        """A message of the stream arrived."""

    def arrived(self, nbytes: int) -> Unread:
        """A latent of ``nbytes`` that counts in the stream's window arrived."""


@dataclass(slots=True)
class Received:
    """An event, the means to say that its latent was read, and where the time of reading it is recorded."""

    event: Event
    latent: Unread | None
    edge: EdgeMeters
    deadline: Deadline = field(default_factory=Deadline)

    def read(self) -> None:
        """The latent behind the event's ref, if there is one, was used or is not wanted: the producer may go on."""
        if self.latent is not None:
            self.latent.read()
            self.deadline.put_off()


class Client(ABC):
    """Reads a stage's streams on behalf of one consumer, whatever carries them."""

    def __init__(self, stage: str, labels: Labels, streaming: StreamingConfig) -> None:
        self.stage = stage
        self._consumer = labels.stage
        self._edge = EdgeMeters(labels, stage)
        self._streaming = streaming

    @abstractmethod
    def stream(self, envelope: Envelope, trace: RunTrace | None = None) -> AsyncGenerator[Received, None]:
        """Every event of one call of ``run``, one by one; ``trace`` notes each message.

        Raises:
            SaturatedError, NotReadyError, ReplicaDiedError, StageTimeoutError, StageFailedError: see ``errors``.
        """

    @abstractmethod
    def _latent_bytes(self, event: OutputEvent) -> int:
        """Bytes of the event's latent that count in the stream's window."""

    async def _events(
        self, batches: AsyncIterator[list[Event]], side: ConsumerSide | None, trace: RunTrace | None
    ) -> AsyncGenerator[Received, None]:
        """Events of ``batches``, each awaited no longer than the deadlines say; failures become our errors."""
        limit, late, deadline = self._streaming.first_chunk_timeout_s, StageTimeoutError, Deadline()
        try:
            while True:
                ours: OmniRayError | None = None
                cancelled = False
                try:
                    async with deadline.within(limit):
                        batch = await anext(batches)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    ours = late(f"stage {self.stage} sent nothing for {limit:g} s")
                except (asyncio.CancelledError, Exception) as error:
                    if _is_ours(error):
                        raise
                    cancelled, ours = isinstance(_cause(error), _CANCELLED), self._mapped(error)
                if cancelled:
                    await asyncio.sleep(OWN_CANCELLATION_S)
                if ours is not None:
                    raise ours  # outside the handler: chained, cause and context would form a cycle that holds frames
                if side is not None:
                    side.took()
                self._measure(batch, trace)
                for event in batch:
                    if isinstance(event, Saturated):
                        raise SaturatedError(event.message, retry_after_s=event.retry_after_s)
                    nbytes = self._latent_bytes(event) if side is not None and isinstance(event, OutputEvent) else 0
                    latent = side.arrived(nbytes) if side is not None and nbytes else None
                    yield Received(event, latent, self._edge, deadline)
                limit, late = self._streaming.idle_timeout_s, StageSilentError
        finally:
            deadline.close()
            self._edge.tell()

    def _measure(self, batch: list[Event], trace: RunTrace | None) -> None:
        last = batch[-1]
        sent_at = last.sent_at if isinstance(last, OutputEvent) else 0.0
        refs = sum(event.ref_bytes for event in batch if isinstance(event, OutputEvent))
        nbytes = refs + sum(map(nbytes_of, batch))
        self._edge.received(nbytes, sent_at)
        if trace is not None and sent_at:
            trace.hop(Hop(self.stage, sent_at, time.time(), nbytes, len(batch)))

    def _mapped(self, error: BaseException) -> OmniRayError:
        """Our error for whatever the handle raised."""
        cause = _cause(error)
        if isinstance(cause, OmniRayError):
            return cause
        if isinstance(cause, BackPressureError):
            return SaturatedError(f"stage {self.stage} is full")
        if isinstance(cause, DeploymentUnavailableError):
            return NotReadyError(f"stage {self.stage} has no replica")
        if isinstance(cause, RayActorError | ObjectLostError):
            return ReplicaDiedError(f"a replica of stage {self.stage} died", stage=self.stage)
        gone = (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
        if isinstance(cause, grpc.RpcError) and cause.code() in gone:
            return ReplicaDiedError(f"a replica of stage {self.stage} went away", stage=self.stage)
        if isinstance(cause, _CANCELLED):
            return ReplicaDiedError(f"a call to stage {self.stage} was cancelled")
        logger.error("stage %s failed in an unforeseen way", self.stage, exc_info=error)
        return StageFailedError(f"stage {self.stage} failed")


class StageClient(Client):
    """Opens streams to a stage through the handle of its deployment."""

    def __init__(
        self, stage: str, handle: DeploymentHandle, labels: Labels, streaming: StreamingConfig, lifelines: LifelineHost
    ) -> None:
        super().__init__(stage, labels, streaming)
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
        except (asyncio.CancelledError, Exception) as error:  # every failure of a ping means the same: not ready
            if _is_ours(error):
                raise
            raise NotReadyError(f"stage {self.stage}: {type(error).__name__}") from error

    async def stream(self, envelope: Envelope, trace: RunTrace | None = None) -> AsyncGenerator[Received, None]:
        """See ``Client.stream``."""
        by_reference = envelope.plan.stage(self.stage).by_reference or envelope.holds_refs()
        if by_reference:
            async with (
                self._lifelines.open() as end,
                aclosing(self._called(self._by_reference, envelope, end, trace)) as events,
            ):
                async for received in events:
                    yield received
        else:
            async with aclosing(self._called(self._by_value, envelope, None, trace)) as events:
                async for received in events:
                    yield received

    async def _called(
        self, handle: DeploymentHandle, envelope: Envelope, end: ConsumerEnd | None, trace: RunTrace | None
    ) -> AsyncGenerator[Received, None]:
        response = handle.remote(envelope, Caller(self._consumer, self.stage, end.address if end else None))
        try:
            async with aclosing(self._events(response.__aiter__(), end, trace)) as events:
                async for received in events:
                    yield received
        finally:
            _cancel(response)

    def _latent_bytes(self, event: OutputEvent) -> int:
        return event.ref_bytes
