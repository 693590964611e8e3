"""The engine for diffusion models: pictures from text, each computed alone, step by step.

A picture is never computed in a batch with another one, so it is the same alone and among others, bit for bit, and
``deterministic`` costs nothing. Picture i of a request draws from a ``torch.Generator`` of its own, seeded with the
request's seed + i: the same noise on every device.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, aclosing
from typing import Any

from omni_ray.engine.admission import Admission
from omni_ray.engine.base import Engine, EngineContext, EngineStats, only_input
from omni_ray.engine.diffusion_run import DiffusionRun, Painted, Stepped
from omni_ray.engine.options import DiffusionOptions
from omni_ray.engine.resume import Resume
from omni_ray.engine.types import Finish, ImagePrompt, Output, Request

STOP_S = 10.0
"""How long ``stop`` waits for running steps."""


class DiffusionModel(ABC):
    """The model side: built in ``Engine.start`` as ``model_cls(context)``."""

    def __init__(self, context: EngineContext) -> None:
        self.context = context

    @abstractmethod
    def load(self) -> None:
        """Load weights and warm up; blocking, in a thread."""

    @abstractmethod
    def completed(self, prompt: ImagePrompt) -> ImagePrompt:
        """``prompt`` with the size and the steps that it leaves to the model.

        Raises:
            InvalidRequestError: it asks for what this model cannot do; before anything is computed.
        """

    @abstractmethod
    def paint(self, prompt: ImagePrompt, seed: int, stepped: Stepped) -> Painted:
        """One picture, whatever ``prompt.count`` says; called by several threads at once.

        ``stepped`` is called after every step of denoising; what it raises ends the picture.
        """


class DiffusionEngine(Engine):
    """Runs one ``DiffusionModel`` for up to ``max_num_seqs`` requests, a thread for each.

    A request's pictures are made one after the other. Cancelling stops between two steps; the place of a request is
    free again when its thread has ended, not before.
    """

    resumable = "replay"

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        assert isinstance(context.options, DiffusionOptions)
        self._admission = Admission(context.stage.name, context.options)
        self._runs: dict[DiffusionRun, asyncio.Task[None]] = {}
        self._model: DiffusionModel = context.model_cls(context)

    async def start(self) -> None:
        """Load the model in a thread."""
        await asyncio.get_running_loop().run_in_executor(None, self._model.load)

    async def generate(
        self, request: Request, inputs: Mapping[str, AsyncGenerator[Any, None]], resume: Resume | None = None
    ) -> AsyncGenerator[Output, None]:
        """See ``Engine.generate``. The one input is an ``ImagePrompt``; with ``resume`` everything is made again."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._admission.place(request))
            (prompt,) = [item async for item in only_input(inputs)]
            prompt = self._model.completed(prompt)
            stack.enter_context(self._admission.computing())
            run = DiffusionRun(request, prompt, self._model.paint)
            held = self._keep(run, stack.pop_all())
            stack.callback(run.cancel)
            async with aclosing(run.outputs()) as outputs:
                async for output in outputs:
                    self._admission.progressed()
                    if isinstance(output, Finish):
                        await asyncio.shield(held)  # who reads the end finds the place free
                    yield output

    def _keep(self, run: DiffusionRun, place: AsyncExitStack) -> asyncio.Task[None]:
        """Hold the request's place until its thread has ended, however early the reader left."""

        async def hold() -> None:
            async with place:
                await run.ended

        task = asyncio.create_task(hold())
        self._runs[run] = task
        task.add_done_callback(lambda _: self._runs.pop(run))
        return task

    async def check_health(self) -> None:
        """See ``Engine.check_health``: every step counts as an output."""
        self._admission.check()

    def stats(self) -> EngineStats:
        """See ``Engine.stats``."""
        return self._admission.stats()

    async def stop(self) -> None:
        """Stop every picture, waiting a while for the steps that run."""
        for run in self._runs:
            run.cancel()
        if self._runs:
            await asyncio.wait(list(self._runs.values()), timeout=STOP_S)
