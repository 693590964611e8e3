"""One request in one stage: opens upstream, feeds the engine through the edges' processors, sends events downstream.

Tasks of one run: one pump per upstream stream, and the engine's own generator. The first failure ends them all.
Upstream streams open when the engine first asks for input, so a full engine refuses before anything upstream starts.
"""

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any

from omni_ray.config.deploy import StreamingConfig
from omni_ray.config.pipeline import REQUEST, Edge, OutputKind, RequestPart, StagePipelineConfig
from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.base import Engine
from omni_ray.engine.resume import Resume
from omni_ray.engine.rewriting import rewriting
from omni_ray.engine.types import (
    AudioChunk,
    AudioClip,
    Chunk,
    Clip,
    Finish,
    ImageChunk,
    ImageClip,
    Output,
    Request,
    StepChunk,
    TextChunk,
    TranscriptChunk,
    VideoClip,
)
from omni_ray.errors import SchemaMismatchError, StageFailedError, TakeoverRefusedError
from omni_ray.serve.effort import Effort
from omni_ray.serve.events import Envelope, Opened, OutputEvent, RecordEvent
from omni_ray.serve.latents import large, load_clip, load_output, store_output
from omni_ray.serve.lifeline import ProducerEnd
from omni_ray.serve.outbox import Outbox, pieces_of
from omni_ray.serve.planner import PlanStage, feeding_edge
from omni_ray.serve.records import recordable
from omni_ray.serve.stage_client import Received, StageClient
from omni_ray.serve.tracing import RunTrace
from omni_ray.serve.watch import Watch

Processor = Callable[[Any, AsyncIterator[Any]], AsyncGenerator[Any, None]]
_PARTS: Mapping[type[Clip], RequestPart] = {
    AudioClip: "input_audio",
    ImageClip: "input_image",
    VideoClip: "input_video",
}
_FINAL_CHUNKS: Mapping[OutputKind, type | UnionType] = {
    "text": TextChunk,
    "audio": AudioChunk,
    "transcript": TranscriptChunk,
    "image": StepChunk | ImageChunk,
}


@dataclass(frozen=True, slots=True)
class StageParts:
    """What every run of a stage shares. Nothing of a request is ever kept here."""

    stage: StagePipelineConfig
    engine: Engine
    clients: Mapping[str, StageClient]
    processors: Mapping[str, Processor]
    streaming: StreamingConfig
    async_chunk: bool
    sampling: SamplingParams
    opened: Opened
    effort: Effort


class StageRun:
    """One request's run; ``go`` fills the outbox and closes it."""

    def __init__(
        self, parts: StageParts, envelope: Envelope, end: ProducerEnd | None, trace: RunTrace | None = None
    ) -> None:
        self._parts = parts
        self._envelope = envelope
        self._part: PlanStage = envelope.plan.stage(parts.stage.name)
        self._end = end
        self._texts = {name for kind, name in envelope.plan.outputs if kind != "audio"}
        self._finals = {name: _FINAL_CHUNKS[kind] for kind, name in envelope.plan.outputs}
        self._edges = [parts.stage.inputs[i] for i in self._part.edges]
        self._queues: dict[str, asyncio.Queue[Received | None]] = {
            edge.source: asyncio.Queue() for edge in self._edges if edge.source != REQUEST
        }
        self._asked = asyncio.Event()
        self._computed = False
        self._unfinished = set(self._queues)
        self._cut_short = False
        self.cut_off = False
        self._refs: list[weakref.ref[OutputEvent]] = []  # weak: an event that was sent and read is gone
        self.refs_travel = end is not None or any(envelope.plan.stage(name).by_reference for name in self._part.calls)
        self.outbox = Outbox(parts.streaming.coalesce_ms, announced=bool(envelope.resume))
        self.watch = Watch(frame_rate=parts.engine.frame_rate())
        self._trace = trace

    async def go(self) -> None:
        """Run to the end; any failure closes the outbox with it."""
        try:
            async with asyncio.TaskGroup() as tasks:
                pumps = [tasks.create_task(self._pump(self._parts.clients[name])) for name in self._part.calls]
                await tasks.create_task(self._compute())
                if self._unfinished and not self._upstream_wanted():
                    self.cut_off = True
                    for pump in pumps:
                        pump.cancel()
        except BaseExceptionGroup as group:
            self.outbox.close(first_failure(group))
        except asyncio.CancelledError as error:
            self.outbox.close(error)
            raise
        else:
            self.outbox.close()

    def abandon(self) -> None:
        """The stream ended badly: let go of every ref, whoever still knows its event."""
        for known in self._refs:
            if (event := known()) is not None:
                event.ref = None

    def held(self) -> tuple[int, int]:
        """Object refs that this run still knows, and the bytes behind them."""
        events = [event for known in self._refs if (event := known()) is not None and event.ref is not None]
        return len(events), sum(event.ref_bytes for event in events)

    def _upstream_wanted(self) -> bool:
        """Whether something further down still takes outputs that come from upstream through this stage."""
        name = self._parts.stage.name
        upstream = self._envelope.plan.upstream(name) - {name}
        ended = {stage for stage, recorded in self._envelope.resume.items() if recorded.resume.finish is not None}
        return bool(upstream & {*(self._finals.keys() - ended), *self._part.feeds})

    async def _compute(self) -> None:
        stage = self._parts.stage
        inputs = {edge.source: self._inputs(edge) for edge in self._edges}
        generate = self._parts.engine.generate(self._request(), inputs, self._resume())
        opened = finished = False
        if self._envelope.resume:
            self.outbox.put(self._parts.opened)
            opened = True
        async with AsyncExitStack() as closing:
            closing.callback(self._parts.effort.rests, self)
            for source in inputs.values():
                await closing.enter_async_context(aclosing(source))
            outputs = await closing.enter_async_context(aclosing(generate))
            async for output in outputs:
                if not opened:
                    self.outbox.put(self._parts.opened)
                    opened = True
                self._made(output)
                if isinstance(output, Finish):
                    finished = True
                    if output.reason == "stop" and self._cut_short:
                        output = replace(output, reason="length")
                await self._send(stage.name, output)
        if not finished:
            raise StageFailedError(f"the engine of stage {stage.name} ended without a finish")
        self._computed = True
        self._asked.set()  # an engine that never asked for input must not leave the pumps waiting
        for queue in self._queues.values():
            while not queue.empty():
                if (left := queue.get_nowait()) is not None:
                    left.read()

    def _made(self, output: Output) -> None:
        before = self.watch.playback.audio_s
        self.watch.output(output)
        if seconds := self.watch.playback.audio_s - before:
            self._parts.effort.sounded(seconds)

    def _resume(self) -> Resume | None:
        """What this stage had made of the request before a replica died.

        Raises:
            TakeoverRefusedError: other code made it, or the engine cannot go on with it.
        """
        name = self._parts.stage.name
        recorded = self._envelope.resume.get(name)
        if recorded is None:
            return None
        if recorded.version != self._parts.opened.version:
            raise TakeoverRefusedError(f"stage {name} now runs other code than what had begun this request")
        if not self._parts.opened.resumable:
            raise TakeoverRefusedError(f"stage {name} cannot go on with a request of another replica")
        return recorded.resume

    def _request(self) -> Request:
        """The request with its sampling resolved for this stage.

        What the client says about sampling is meant for the stage that owns the tokenizer; where a plan has none
        (speech), for the first autoregressive stage.
        """
        stage, envelope = self._parts.stage, self._envelope
        says = envelope.request.sampling if stage.name == envelope.plan.sampled else SamplingParams()
        sampling = SamplingParams.resolve(
            constraints=stage.sampling_constraints, request=says, deploy=self._parts.sampling, default=stage.sampling
        )
        return replace(envelope.request, sampling=sampling)

    async def _send(self, stage: str, output: Output) -> None:
        if not self._wanted(stage, output):
            return
        if self._end is not None and large(output, self._parts.streaming.inline_bytes):
            if stage not in self._texts:
                await self._end.acquire(output.rows.nbytes)
            else:  # waiting would delay the text that comes after it; max_tokens bounds what can pile up
                self._end.note(output.rows.nbytes)
            event = await store_output(stage, output)
            self._refs.append(weakref.ref(event))
            self._put(event)
        else:
            for piece in pieces_of(output):
                self.outbox.put(OutputEvent(stage, piece))

    def _put(self, event: OutputEvent) -> None:
        """Send an event that may hold a ref; only what is next to go out may be held, so nothing comes between."""
        if self._end is not None and event.ref is not None:
            self._end.hold(event.ref, event.ref_bytes)
        self.outbox.put(event)

    def _wanted(self, stage: str, output: Output) -> bool:
        """Whether anybody downstream takes this output: a later stage takes all, the client its kind and the finish."""
        if stage in self._part.feeds:
            return True
        return stage in self._finals and isinstance(output, Finish | self._finals[stage])

    async def _inputs(self, edge: Edge) -> AsyncGenerator[Any, None]:
        """The edge's processor over its source, both closed with this generator."""
        self.watch.asks()
        self._parts.effort.works(self)
        source = self._clips(edge) if edge.source == REQUEST else self._chunks(edge.source)
        processor = self._parts.processors[edge.processor]
        if edge.rewrites is not None:
            processor = rewriting(processor, edge.rewrites)
        async with aclosing(source), aclosing(processor(self._envelope.request, source)) as items:
            async for item in items:
                yield item

    async def _clips(self, edge: Edge) -> AsyncGenerator[Clip, None]:
        """The media that the edge takes."""
        for stored in self._envelope.clips:
            if _PARTS[type(stored.clip)] in edge.parts:
                yield await load_clip(stored)

    async def _chunks(self, source: str) -> AsyncGenerator[Chunk, None]:
        """Chunks of ``source``, as they come or (``async_chunk: false``) all at the end."""
        if self._parts.async_chunk:
            async with aclosing(self._arrivals(source)) as arrivals:
                async for chunk in arrivals:
                    yield chunk
            return
        for chunk in [chunk async for chunk in self._arrivals(source)]:
            yield chunk

    async def _arrivals(self, source: str) -> AsyncGenerator[Chunk, None]:
        queue = self._queues[source]
        self._asked.set()
        while (received := await self._next(queue)) is not None:
            event = received.event
            self.watch.feeds()
            assert isinstance(event, OutputEvent)
            assert not isinstance(event.output, Finish)
            if event.ref_bytes and event.ref is None:
                continue  # its producer abandoned the stream; the error follows
            try:
                if event.ref is None:
                    yield event.output
                else:
                    began = time.monotonic()
                    chunk = await load_output(event)
                    received.edge.read(time.monotonic() - began)
                    yield chunk
            finally:
                received.read()  # the consumer came back for more, or wants no more

    async def _next(self, queue: asyncio.Queue[Received | None]) -> Received | None:
        """The next arrival; an engine that must wait for it, and reads nothing ahead, does nothing for this run."""
        if self._parts.engine.reads_ahead or not queue.empty():
            return await queue.get()
        self._parts.effort.rests(self)
        received = await queue.get()
        self._parts.effort.works(self)
        return received

    async def _pump(self, client: StageClient) -> None:
        """Take one upstream stream apart: what feeds this stage into queues, what is wanted further down outwards."""
        await self._asked.wait()
        async with aclosing(client.stream(self._envelope, self._trace)) as stream:
            async for received in stream:
                if isinstance(received.event, Opened):
                    self._check_schema(received.event)
                    self.outbox.put(received.event)
                elif isinstance(received.event, RecordEvent):
                    self.outbox.put(received.event)
                elif isinstance(received.event, OutputEvent):
                    self._pass_on(received.event, received)
        if self._unfinished & self._envelope.plan.upstream(client.stage):
            raise StageFailedError(f"the stream of stage {client.stage} ended without a finish")

    def _pass_on(self, event: OutputEvent, received: Received) -> None:
        if event.ref is not None:
            self._refs.append(weakref.ref(event))
        if self._wanted(event.stage, event.output):
            if self._end is not None:
                self._end.note(event.ref_bytes)
            self._put(event)
        elif self._envelope.records and recordable(event.output):
            self.outbox.put(RecordEvent(event.stage, event.output))
        queue = self._queues.get(event.stage)
        if queue is not None and isinstance(event.output, Finish):
            self._unfinished.discard(event.stage)
            self._cut_short |= event.output.reason == "length"  # what was made from a part is a part itself
        if queue is None or self._computed:
            received.read()
        else:
            queue.put_nowait(None if isinstance(event.output, Finish) else received)

    def _check_schema(self, opened: Opened) -> None:
        edge = feeding_edge(self._parts.stage, self._part, opened.stage)
        name = self._parts.stage.name
        if edge is None:
            return
        given = opened.schema_versions.get(name)
        if given != edge.schema_version:
            raise SchemaMismatchError(
                f"edge {opened.stage} -> {name}: schema version {given} arrived, {edge.schema_version} is spoken here; "
                f"a roll-out is under way"
            )


def first_failure(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first leaf of an exception group."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
