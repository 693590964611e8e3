"""One request in one stage: opens upstream, feeds the engine through the edges' processors, sends events downstream.

Tasks of one run: one pump per upstream stream, and the engine's own generator. The first failure ends them all.
Upstream streams open when the engine first asks for input, so a full engine refuses before anything upstream starts.
"""

import asyncio
import weakref
from collections.abc import Mapping
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from types import UnionType

from omni_ray.config.pipeline import OutputKind
from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.resume import Resume
from omni_ray.engine.types import (
    AudioChunk,
    Finish,
    ImageChunk,
    LatentChunk,
    Output,
    Request,
    StepChunk,
    TextChunk,
    TranscriptChunk,
)
from omni_ray.errors import SchemaMismatchError, StageFailedError, TakeoverRefusedError
from omni_ray.serve.events import Envelope, Opened, OutputEvent, RecordEvent
from omni_ray.serve.latents import large, store_output
from omni_ray.serve.lifeline import ProducerEnd
from omni_ray.serve.outbox import Outbox, pieces_of
from omni_ray.serve.planner import PlanStage, feeding_edge
from omni_ray.serve.records import recordable
from omni_ray.serve.stage_client import Client, Received
from omni_ray.serve.stage_inputs import StageInputs
from omni_ray.serve.stage_parts import StageParts
from omni_ray.serve.tracing import RunTrace
from omni_ray.serve.watch import Watch
from omni_ray.serve.window import Window

_FINAL_CHUNKS: Mapping[OutputKind, type | UnionType] = {
    "text": TextChunk,
    "audio": AudioChunk,
    "transcript": TranscriptChunk,
    "image": StepChunk | ImageChunk,
}


class StageRun:
    """One request's run; ``go`` fills the outbox and closes it."""

    def __init__(
        self,
        parts: StageParts,
        envelope: Envelope,
        end: ProducerEnd | None,
        trace: RunTrace | None = None,
        local: Window | None = None,
    ) -> None:
        """``end``: of a stream that may carry refs. ``local``: the window of one that stays in this process."""
        self._parts = parts
        self._envelope = envelope
        self._part: PlanStage = envelope.plan.stage(parts.stage.name)
        self._end = end
        self._window = end if local is None else local
        self._texts = {name for kind, name in envelope.plan.outputs if kind != "audio"}
        self._finals = {name: _FINAL_CHUNKS[kind] for kind, name in envelope.plan.outputs}
        self.watch = Watch(frame_rate=parts.engine.frame_rate())
        self._inputs = StageInputs(parts, envelope, self._part, self.watch)
        self._unfinished = set(self._inputs.sources)
        self._cut_short = False
        self.cut_off = False
        self._refs: list[weakref.ref[OutputEvent]] = []  # weak: an event that was sent and read is gone
        self.refs_travel = end is not None or any(envelope.plan.stage(name).by_reference for name in self._part.calls)
        coalesce_ms = parts.streaming.coalesce_ms if local is None else 0
        self.outbox = Outbox(coalesce_ms, announced=bool(envelope.resume))
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

    def waited_for(self) -> bool:
        """Whether its listener waits for this stage, and not for what comes before it."""
        return self._inputs.at_work()

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
        inputs = self._inputs.open()
        generate = self._parts.engine.generate(self._request(), inputs, self._resume())
        opened = finished = False
        if self._envelope.resume:
            self.outbox.put(self._parts.opened)
            opened = True
        async with AsyncExitStack() as closing:
            closing.callback(self._inputs.over)
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
        self._inputs.drop()

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
        if self._window is not None and large(output, self._parts.streaming.inline_bytes):
            if stage not in self._texts:
                await self._window.acquire(output.rows.nbytes)
            else:  # waiting would delay the text that comes after it; max_tokens bounds what can pile up
                self._window.note(output.rows.nbytes)
            await self._send_large(stage, output)
        else:
            for piece in pieces_of(output):
                self.outbox.put(OutputEvent(stage, piece))

    async def _send_large(self, stage: str, output: LatentChunk) -> None:
        """Send a latent that counts in the window: behind a ref, or as it is if it stays in this process."""
        if self._end is None:
            self.outbox.put(OutputEvent(stage, output))
            return
        event = await store_output(stage, output)
        self._refs.append(weakref.ref(event))
        self._put(event)

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

    async def _pump(self, client: Client) -> None:
        """Take one upstream stream apart: what feeds this stage into queues, what is wanted further down outwards."""
        await self._inputs.asked.wait()
        async with aclosing(client.stream(self._envelope, self._trace)) as stream:
            async for received in stream:
                if isinstance(received.event, Opened):
                    self._check_schema(received.event)
                    self.outbox.put(received.event)
                elif isinstance(received.event, RecordEvent):
                    self.outbox.put(received.event)
                elif isinstance(received.event, OutputEvent):
                    await self._pass_on(received.event, received)
        if self._unfinished & self._envelope.plan.upstream(client.stage):
            raise StageFailedError(f"the stream of stage {client.stage} ended without a finish")

    async def _pass_on(self, event: OutputEvent, received: Received) -> None:
        if event.ref is not None:
            self._refs.append(weakref.ref(event))
        if self._wanted(event.stage, event.output):
            if (
                self._window is not None
                and event.ref is None
                and large(event.output, self._parts.streaming.inline_bytes)
            ):
                self._window.note(event.output.rows.nbytes)  # it was made in this process
                await self._send_large(event.stage, event.output)
            else:
                if self._end is not None:
                    self._end.note(event.ref_bytes)
                self._put(event)
        elif self._envelope.records and recordable(event.output):
            self.outbox.put(RecordEvent(event.stage, event.output))
        if event.stage in self._inputs.sources and isinstance(event.output, Finish):
            self._unfinished.discard(event.stage)
            self._cut_short |= event.output.reason == "length"  # what was made from a part is a part itself
        self._inputs.arrived(event.stage, received, last=isinstance(event.output, Finish))

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
