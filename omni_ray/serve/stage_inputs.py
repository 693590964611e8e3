"""What reaches one run's engine: the edges' processors, over what upstream sends or over the request's own media."""

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from omni_ray.config.pipeline import REQUEST, Edge, RequestPart
from omni_ray.engine.rewriting import rewriting
from omni_ray.engine.types import AudioClip, Chunk, Clip, Finish, ImageClip, VideoClip
from omni_ray.serve.events import Envelope, OutputEvent
from omni_ray.serve.latents import load_clip, load_output
from omni_ray.serve.planner import PlanStage
from omni_ray.serve.stage_client import Received
from omni_ray.serve.stage_parts import StageParts
from omni_ray.serve.watch import Watch

_PARTS: Mapping[type[Clip], RequestPart] = {
    AudioClip: "input_audio",
    ImageClip: "input_image",
    VideoClip: "input_video",
}


class StageInputs:
    """The inputs of one run; they also tell when it waits for upstream and when its engine has something to do.

    Attributes:
        sources: stages that feed the engine.
        asked: set when the engine first asks for what a stage makes, or never will.
    """

    def __init__(self, parts: StageParts, envelope: Envelope, part: PlanStage, watch: Watch) -> None:
        self._parts = parts
        self._envelope = envelope
        self._watch = watch
        self._edges = [parts.stage.inputs[i] for i in part.edges]
        self._queues: dict[str, asyncio.Queue[Received | None]] = {
            edge.source: asyncio.Queue() for edge in self._edges if edge.source != REQUEST
        }
        self._dropped = False
        self.sources = frozenset(self._queues)
        self.asked = asyncio.Event()

    def open(self) -> dict[str, AsyncGenerator[Any, None]]:
        """The engine's inputs, by source; lazy."""
        return {edge.source: self._of(edge) for edge in self._edges}

    def arrived(self, source: str, received: Received, *, last: bool) -> None:
        """Something of ``source`` came, which is read here if the engine does not take it; ``last``: its end."""
        queue = self._queues.get(source)
        if queue is None or self._dropped:
            received.read()
        else:
            queue.put_nowait(None if last else received)

    def drop(self) -> None:
        """The engine wants no more: read what is left. One that never asked must not leave anybody waiting."""
        self._dropped = True
        self.asked.set()
        for queue in self._queues.values():
            while not queue.empty():
                if (left := queue.get_nowait()) is not None:
                    left.read()

    def at_work(self) -> bool:
        """Whether the engine has something to do for this run."""
        return self._parts.effort.at_work(self)

    def over(self) -> None:
        """The engine does nothing for this run any more."""
        self._parts.effort.rests(self)

    async def _of(self, edge: Edge) -> AsyncGenerator[Any, None]:
        """The edge's processor over its source, both closed with this generator."""
        self._watch.asks()
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
        self.asked.set()
        while (received := await self._next(queue)) is not None:
            event = received.event
            self._watch.feeds()
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
