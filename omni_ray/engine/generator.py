"""The engine for upstream models that are a Python generator per request (``inference_stream()`` and its like).

Such a model keeps its state in the generator's frame, draws from global random generators and may hold temporary
files. So every request has one generator, on a thread of its own that alone calls ``next`` and ``close``; one lock per
replica lets a single step run at a time, with the request's own random state in place. Parallelism comes from replicas.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_ray.audio import check_finite
from omni_ray.engine.admission import Admission
from omni_ray.engine.base import Engine, EngineContext, EngineStats, only_input
from omni_ray.engine.generator_run import GeneratorRun, Job, Piece, StepLock
from omni_ray.engine.options import GeneratorOptions
from omni_ray.engine.resume import Resume
from omni_ray.engine.types import AudioChunk, Finish, FinishReason, Output, Request, Usage
from omni_ray.errors import StageFailedError

STOP_S = 10.0
"""How long ``stop`` waits for running steps, so that generators can clean up."""


class GeneratorModel(ABC):
    """The model side: built in ``Engine.start`` as ``model_cls(context)``.

    Attributes:
        sample_rate: Hz, known after ``load``.
        samples_per_token: samples of one audio token, for usage; known after ``load``.
    """

    sample_rate: int
    samples_per_token: int

    def __init__(self, context: EngineContext) -> None:
        self.context = context

    @abstractmethod
    def load(self) -> None:
        """Load weights and warm up; blocking, in a thread."""

    @abstractmethod
    def speak(self, job: Job) -> Iterator[Piece]:
        """A new generator for one request, which alone holds its state.

        It is advanced and closed on one thread, never while another request's step runs; files belong in
        ``job.scratch``. It stops by returning or by an empty increment.
        """


class GeneratorEngine(Engine):
    """Runs one ``GeneratorModel`` generator per request and makes mono ``AudioChunk`` of what they yield.

    Increments are sound as it comes; a whole piece counts only where no increment came (upstream gives it last, too).
    Channels are averaged. The place of a request is free again when its generator is closed, not before.
    """

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        assert isinstance(context.options, GeneratorOptions)
        self._options = context.options
        self._admission = Admission(context.stage.name, context.options)
        self._lock = StepLock()
        self._runs: dict[GeneratorRun, asyncio.Task[None]] = {}
        self._model: GeneratorModel = context.model_cls(context)

    async def start(self) -> None:
        """Load the model in a thread."""
        await asyncio.get_running_loop().run_in_executor(None, self._model.load)

    async def generate(
        self, request: Request, inputs: Mapping[str, AsyncGenerator[Any, None]], resume: Resume | None = None
    ) -> AsyncGenerator[Output, None]:
        """See ``Engine.generate``. All inputs are read before the generator starts."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._admission.place(request))
            items = [item async for item in only_input(inputs)]
            run = GeneratorRun(request, items, self._model.speak, self._lock, self._options.max_pieces)
            self._keep(run, stack.pop_all())
            stack.callback(run.cancel)
            async with aclosing(self._outputs(request, run)) as outputs:
                async for output in outputs:
                    yield output

    def _keep(self, run: GeneratorRun, place: AsyncExitStack) -> None:
        """Hold the request's place until its generator is closed, however early the reader left."""

        async def hold() -> None:
            async with place:
                await run.closed

        task = asyncio.create_task(hold())
        self._runs[run] = task
        task.add_done_callback(lambda _: self._runs.pop(run))

    async def _outputs(self, request: Request, run: GeneratorRun) -> AsyncGenerator[Output]:
        limit = int(request.max_audio_seconds * self._model.sample_rate)
        position = 0
        reason: FinishReason = "stop"
        async with aclosing(run.pieces()) as pieces:
            async for piece in pieces:
                if piece.whole and position:
                    continue
                samples = _mono(piece.samples)
                if not piece.whole and not len(samples):
                    break
                check_finite(samples)
                kept = samples[: limit - position]
                if len(kept):
                    yield AudioChunk(position, kept, self._model.sample_rate)
                position += len(kept)
                if len(kept) < len(samples):
                    reason = "length"
                    break
        yield Finish(reason, Usage(audio_tokens=-(-position // self._model.samples_per_token)))

    async def check_health(self) -> None:
        """See ``Engine.check_health``: a step may take ``stall_s``; one that waits for a slow reader runs no step."""
        seconds = self._lock.step_seconds()
        if seconds > self._options.stall_s:
            raise StageFailedError(f"stage {self.context.stage.name} hangs: one step has run for {seconds:.0f} s")

    def stats(self) -> EngineStats:
        """See ``Engine.stats``."""
        return self._admission.stats()

    async def stop(self) -> None:
        """Close every generator, waiting a while for the steps that run."""
        for run in self._runs:
            run.cancel()
        if self._runs:
            await asyncio.wait(list(self._runs.values()), timeout=STOP_S)


def _mono(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """Samples [n] of [n] or [channels, n]: channels averaged. Interleaving them would halve pitch and speed."""
    return samples if samples.ndim == 1 else samples.mean(axis=0, dtype=np.float32)
