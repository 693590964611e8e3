"""The codec engine: decodes code frames or latents to sound, many requests in one batch, as they stream in.

What a codec must be is ``Codec``; ``WindowCodec`` makes one of a decoder that keeps no state. The engine owns the rest:
chunk sizes, batching, isolation of failures, the length limit. Stream and one call give the same samples, so chunk
sizes are a matter of speed only.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from omni_ray.engine.admission import Admission
from omni_ray.engine.base import Engine, EngineContext, EngineStats, only_input
from omni_ray.engine.batches import Batches, BatchLengthError
from omni_ray.engine.chunk_growth import ChunkGrowth
from omni_ray.engine.lead import Lead
from omni_ray.engine.options import CodecOptions
from omni_ray.engine.rechunk import Rechunker, Units, array_of
from omni_ray.engine.resume import Resume
from omni_ray.engine.types import AudioChunk, CodeFrameChunk, Finish, FinishReason, Output, Request, Usage
from omni_ray.errors import ConfigError, NonFiniteAudioError, StageFailedError

Samples: TypeAlias = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class DecodeItem:
    """One request's part in a batch.

    Attributes:
        state: what ``Codec.open`` gave for the request.
        units: the request's next frames or rows; possibly none, with ``last`` or at the end of a segment.
        last: nothing follows: the tail is to be given too.
    """

    state: Any
    units: Units
    last: bool


class Codec(ABC):
    """The model side: built as ``model_cls(context)``, possibly before weights exist.

    Attributes:
        sample_rate: Hz. channels: of every output. Both are known after ``load``.
        streaming: ``state`` carries state from call to call; ``window`` decodes again some frames of context (see
            ``WindowCodec``); ``whole`` can not stream: it gets a request's frames, or a segment's rows, in one call.
    """

    sample_rate: int
    channels: int = 1
    streaming: ClassVar[Literal["state", "window", "whole"]]

    def __init__(self, context: EngineContext) -> None:
        self.context = context

    @abstractmethod
    def load(self) -> None:
        """Load weights and warm up; blocking, in the thread that decodes."""

    @abstractmethod
    def open(self, request: Request) -> Any:
        """The state of a new request; cheap, on the event loop."""

    @abstractmethod
    def decode(self, items: Sequence[DecodeItem]) -> Sequence[Samples]:
        """Decode one step of several requests, in the decoding thread.

        Whatever raises must leave every state such that each item gives what it would have given: the engine then
        tries each alone.

        Args:
            items: at most one per request.

        Returns:
            For each item, float32 [n] or [n, channels]: all samples that became final, so that the outputs of a
            request's calls, one after the other, are what one call with all its units would have given.
        """

    def check(self) -> None:  # noqa: B027 most codecs compute in this process
        """Raise ``EngineDiedError`` if what the codec computes with is gone; cheap, on the event loop."""

    def stop(self) -> None:  # noqa: B027
        """Free everything; no step comes any more."""

    def close(self, state: Any) -> None:  # noqa: B027 most codecs hold nothing
        """The request is over, however it ended; runs in the decoding thread after any step in progress."""


@dataclass(slots=True)
class WindowState:
    """Frames [n, codebooks] still needed, of which the first is frame ``start``; ``emitted`` counts samples."""

    frames: NDArray[np.int64] | None = None
    start: int = 0
    emitted: int = 0


class WindowCodec(Codec):
    """A decoder without state: decodes each chunk together with frames before and after it, and keeps what is new.

    Windows are stitched by absolute sample index: sample i belongs to frame ``i // samples_per_frame``, needs
    ``min_left_context`` frames before that one and ``right_context`` after it. Decoders whose transposed convolutions
    are trimmed give D samples less than ``frames * samples_per_frame``; the gap is at a window's end and the next
    window fills it, so a stream lacks only the last D samples of the request, as one call does.

    Attributes:
        samples_per_frame: of the decoder.
        min_left_context: frames of left context at which windows equal one call.
        right_context: frames held back until they are no longer the newest.
        left_context: frames of left context in use.
    """

    streaming = "window"
    samples_per_frame: int
    min_left_context: int = 0
    right_context: int = 0

    def __init__(self, context: EngineContext) -> None:
        """Resolve the left context. Raises as ``use_context``."""
        super().__init__(context)
        self.use_context(self.min_left_context, self.right_context)

    def use_context(self, left: int, right: int) -> None:
        """Set both contexts; ``load`` calls it where they depend on the checkpoint.

        Args:
            left: at least so many frames of left context make windows equal one call.
            right: frames to hold back.

        Raises:
            ConfigError: ``engine.left_context`` is below ``left``.
        """
        assert isinstance(self.context.options, CodecOptions)
        chosen = self.context.options.left_context
        if chosen is not None and chosen < left:
            raise ConfigError(
                [
                    f"stage {self.context.stage.name!r}, engine.left_context: {chosen} is below {left},"
                    f" the fewest frames at which {type(self).__name__} streams without clicks"
                ]
            )
        self.min_left_context, self.right_context = left, right
        self.left_context = left if chosen is None else chosen

    @abstractmethod
    def decode_windows(self, windows: Sequence[NDArray[np.int64]]) -> Sequence[Samples]:
        """Decode windows [n, codebooks], of different n, to at most ``n * samples_per_frame`` samples each."""

    def open(self, request: Request) -> WindowState:
        """See ``Codec.open``."""
        return WindowState()

    def decode(self, items: Sequence[DecodeItem]) -> list[Samples]:
        """See ``Codec.decode``."""
        plans = [self._plan(item) for item in items]
        windows = [plan.frames for plan, wanted in plans if wanted and plan.frames is not None]
        outputs = self.decode_windows(windows) if windows else []
        if len(outputs) != len(windows):
            raise BatchLengthError(f"{len(windows)} windows were decoded to {len(outputs)} outputs")
        pending = iter(outputs)
        nothing = np.zeros((0, self.channels) if self.channels > 1 else 0, np.float32)
        done = [
            self._stitch(plan, next(pending), item.last) if wanted else (nothing, plan)
            for item, (plan, wanted) in zip(items, plans, strict=True)
        ]
        for item, (_, state) in zip(items, done, strict=True):  # only now: a failed batch leaves no trace
            item.state.frames, item.state.start, item.state.emitted = state.frames, state.start, state.emitted
        return [samples for samples, _ in done]

    def _plan(self, item: DecodeItem) -> tuple[WindowState, bool]:
        """The state with the new frames in it, and whether decoding them would make samples final."""
        assert isinstance(item.units, CodeFrameChunk)
        state, new = item.state, item.units.frames
        frames = new if state.frames is None else np.concatenate([state.frames, new])
        plan = self._trim(WindowState(frames, state.start, state.emitted))
        held_back = 0 if item.last else self.right_context
        fresh = len(new) > 0 or self.right_context > 0
        return plan, fresh and plan.emitted < (state.start + len(frames) - held_back) * self.samples_per_frame

    def _stitch(self, plan: WindowState, window: Samples, last: bool) -> tuple[Samples, WindowState]:
        assert plan.frames is not None
        first, end = plan.start * self.samples_per_frame, plan.start + len(plan.frames)
        available = first + len(window)
        if available > end * self.samples_per_frame:
            raise StageFailedError(f"a window of {len(plan.frames)} frames was decoded to {len(window)} samples")
        until = available if last else min(available, (end - self.right_context) * self.samples_per_frame)
        until = max(until, plan.emitted)
        return window[plan.emitted - first : until - first], self._trim(replace(plan, emitted=until))

    def _trim(self, state: WindowState) -> WindowState:
        """Drop the frames that no sample to come needs."""
        assert state.frames is not None
        start = max(state.start, state.emitted // self.samples_per_frame - self.left_context)
        return WindowState(state.frames[start - state.start :], start, state.emitted)


class CodecEngine(Engine):
    """Runs a ``Codec`` for many requests: one batch at a time, in one thread.

    A request that goes on after its replica died is decoded again from its first frame or row, which rebuilds whatever
    the codec carries; what was heard is not given out again. Its chunks follow the schedule until more is to be heard.
    """

    resumable = "replay"

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        assert isinstance(context.options, CodecOptions)
        self._options = context.options
        self._admission = Admission(context.stage.name, context.options)
        self._codec: Codec = context.model_cls(context)
        self._batches = Batches(
            context.stage.name,
            self._codec.decode,
            self._checked,
            self._admission.computing,
            size=lambda item: len(array_of(item.units)),
            step_s=self._options.step_ms / 1000,
        )

    async def start(self) -> None:
        """Load the codec in the thread that will decode."""
        await self._batches.run(self._codec.load)

    async def generate(
        self, request: Request, inputs: Mapping[str, AsyncGenerator[Any, None]], resume: Resume | None = None
    ) -> AsyncGenerator[Output, None]:
        """See ``Engine.generate``. Chunks follow the request's own schedule and lead."""
        reason: FinishReason = "stop"
        rate, position, units = self._codec.sample_rate, 0, 0
        limit = int(request.max_audio_seconds * rate)
        heard = resume.samples if resume is not None else 0
        if resume is not None and resume.finish is not None:
            yield resume.finish
            return
        async with self._admission.place(request):
            state, lead = self._codec.open(request), Lead(request)
            options = self._options
            growth = ChunkGrowth(options.chunk_frames, options.chunk_growth, lead, options.step_ms / 1000)
            rechunker = Rechunker(None if self._codec.streaming == "whole" else growth.size)
            try:
                async with (
                    aclosing(only_input(inputs)) as source,
                    aclosing(_chunks(source, rechunker)) as chunks,
                ):
                    async for chunk, last in chunks:
                        samples = await self._batches.submit(DecodeItem(state, chunk, last), lead)
                        units += len(array_of(chunk))
                        kept = samples[: limit - position]
                        new = kept[max(0, heard - position) :]
                        position += len(kept)
                        growth.decoded(units, position / rate)
                        if len(new):
                            yield AudioChunk(position - len(new), new, rate)
                            lead.emitted((position - heard) / rate)
                        if len(kept) < len(samples):
                            reason = "length"
                            break
                yield Finish(reason, Usage(audio_tokens=units))
            finally:
                self._batches.after_step(self._codec.close, state)

    async def check_health(self) -> None:
        """See ``Engine.check_health``."""
        self._codec.check()
        self._admission.check()

    def stats(self) -> EngineStats:
        """See ``Engine.stats``."""
        return self._admission.stats()

    async def stop(self) -> None:
        """See ``Engine.stop``."""
        self._batches.stop()
        self._codec.stop()

    def _checked(self, output: Samples) -> Samples:
        stage, channels, samples = self.context.stage.name, self._codec.channels, np.asarray(output, np.float32)
        if samples.shape[1:] != (channels,) and not (channels == 1 and samples.ndim == 1):
            raise StageFailedError(f"stage {stage}: samples of shape {samples.shape} for {channels} channels")
        if not np.isfinite(samples).all():
            raise NonFiniteAudioError(f"stage {stage} produced samples that are not finite")
        return samples


async def _chunks(
    source: AsyncGenerator[Units, None], rechunker: Rechunker
) -> AsyncGenerator[tuple[Units, bool], None]:
    """Chunks, and whether nothing follows. Flushes once, on normal end; an upstream error passes through."""
    async for unit in source:
        for chunk in rechunker.push(unit):
            yield chunk, False
    rest = rechunker.flush()
    if rest is not None:
        yield rest, True
