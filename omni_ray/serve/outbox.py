"""A stream's way out of a stage: the first text and the first sound at once, then small lists, soon larger ones."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

from omni_ray.engine.types import AudioChunk, CodeFrameChunk, ImageChunk, LatentChunk, Output
from omni_ray.serve.events import Event, Opened, OutputEvent, RecordEvent
from omni_ray.serve.records import merged

MAX_BATCH_BYTES = 1_000_000
"""A list is cut here, far below the 4 MB cap of Serve's gRPC transport."""
_QUIET = (Opened, RecordEvent)
"""Events that are not worth a message of their own."""
_SOUND = (AudioChunk, CodeFrameChunk)
PATIENCE = 1 / 6
"""No event waits for others longer than this part of the time since the stream's beginning, or since its first sound:
the first tokens and frames are what the first sound is made of."""
LEAST_PATIENCE_S = 0.004
"""But so long in any case: what is made faster than that needs no message of its own."""


class Outbox:
    """Events put by one request's tasks, taken in order by the one generator that Serve iterates.

    With ``announced``, ``Opened`` leaves at once: of a request that goes on after a death, the ingress wants to know at
    any moment on whom it runs.
    """

    def __init__(self, coalesce_ms: float, *, announced: bool = False) -> None:
        self._pause = coalesce_ms / 1000
        self._quiet = RecordEvent if announced else _QUIET
        self._events: list[Event] = []
        self._began = math.inf  # when the first list left, or the first sound came
        self._sounds = False
        self._filled = asyncio.Event()
        self._closed = False
        self._error: BaseException | None = None

    def put(self, event: Event) -> None:
        """Append an event; never blocks, what a request may hold is bounded by its limits.

        ``Opened`` waits for the output it announces: alone it would make the first sound wait for the coalescing time.
        Records wait for any output: they are of use only once something was shown.
        """
        self._events.append(event)
        if not isinstance(event, self._quiet):
            if not self._sounds and isinstance(event, OutputEvent) and isinstance(event.output, _SOUND):
                self._sounds, self._began = True, time.monotonic()
            self._filled.set()

    def close(self, error: BaseException | None = None) -> None:
        """No more events; with ``error``, it is raised after those already put."""
        if not self._closed:
            self._closed, self._error = True, error
            self._filled.set()

    async def batches(self) -> AsyncIterator[list[Event]]:
        """Lists of events until ``close``."""
        flushed = -math.inf
        while True:
            await self._filled.wait()
            await self._collect(flushed)
            if self._error is not None and all(isinstance(event, self._quiet) for event in self._events):
                self._events.clear()  # nothing was shown: whoever waits may still be answered by another replica
            flushed = time.monotonic()  # not when the reader came back: its pause is no reason to wait longer
            self._began = min(self._began, flushed)
            for batch in self._take():
                if isinstance(last := batch[-1], OutputEvent):
                    last.sent_at = time.time()
                yield batch
            if self._closed and not self._events:
                error, self._error = self._error, None  # kept here it would keep its traceback's frames
                if error is not None:
                    raise error
                return

    async def _collect(self, flushed: float) -> None:
        """Let more events come until enough time has passed since ``flushed``, less if the stream ends meanwhile."""
        while not self._closed and (left := flushed + self._patience() - time.monotonic()) > 0:
            self._filled.clear()
            try:
                async with asyncio.timeout(left):
                    await self._filled.wait()
            except TimeoutError:
                return

    def _patience(self) -> float:
        """Seconds between two lists, for now."""
        return min(self._pause, max(LEAST_PATIENCE_S, (time.monotonic() - self._began) * PATIENCE))

    def _take(self) -> list[list[Event]]:
        waiting, self._events = self._events, []
        if not self._closed:
            self._filled.clear()
        if len(waiting) == 1:
            return [waiting]
        records = merged([event for event in waiting if isinstance(event, RecordEvent)])
        events = [*records, *(event for event in waiting if not isinstance(event, RecordEvent))]
        batches: list[list[Event]] = []
        size = 0
        for event in events:
            if not batches or size + nbytes_of(event) > MAX_BATCH_BYTES:
                batches.append([])
                size = 0
            batches[-1].append(event)
            size += nbytes_of(event)
        return batches


def pieces_of(output: Output) -> Iterator[Output]:
    """``output``; sound and pictures of more than ``MAX_BATCH_BYTES`` in pieces, as an event must fit in a message."""
    match output:
        case AudioChunk(samples=array) | ImageChunk(pixels=array) if array.nbytes > MAX_BATCH_BYTES:
            size = max(1, MAX_BATCH_BYTES // (array.nbytes // len(array)))
            for start in range(0, len(array), size):
                yield _piece(output, start, start + size)
        case _:
            yield output


def _piece(chunk: AudioChunk | ImageChunk, start: int, end: int) -> AudioChunk | ImageChunk:
    position = chunk.position + start
    if isinstance(chunk, AudioChunk):
        return replace(chunk, position=position, samples=chunk.samples[start:end])
    return replace(chunk, position=position, pixels=chunk.pixels[start:end], row=chunk.row + start)


def nbytes_of(event: Event) -> int:
    """Bytes of the array that the event itself carries."""
    if not isinstance(event, OutputEvent | RecordEvent):
        return 0
    match event.output:
        case (
            AudioChunk(samples=array)
            | LatentChunk(rows=array)
            | CodeFrameChunk(frames=array)
            | ImageChunk(pixels=array)
        ):
            return array.nbytes
        case _:
            return 0
