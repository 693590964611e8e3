"""One coroutine per request: the engine for models that compute a request on their own, without batching.

The model is an async generator over its inputs; its blocking calls run in a small thread pool, never on the event
loop. Parallelism beyond ``threads`` comes from replicas.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Literal

from omni_ray.engine.admission import Admission
from omni_ray.engine.base import Engine, EngineContext, EngineStats
from omni_ray.engine.options import PerRequestOptions
from omni_ray.engine.resume import Resume
from omni_ray.engine.threads import Threads
from omni_ray.engine.types import Output, Request


class PerRequestModel(ABC):
    """The model side: built in ``Engine.start`` as ``model_cls(context)``.

    Attributes:
        resumable: see ``Engine``. A model that says ``replay`` makes the same outputs of the same inputs, bit for bit,
            in every replica.
        frame_rate: code frames for one second of sound; None if it makes none.
    """

    resumable: Literal["none", "replay"] = "none"
    frame_rate: float | None = None

    def __init__(self, context: EngineContext) -> None:
        self.context = context

    @abstractmethod
    def load(self) -> None:
        """Load weights and warm up; blocking, runs in a thread."""

    @abstractmethod
    def generate(
        self,
        request: Request,
        inputs: Mapping[str, AsyncGenerator[Any, None]],
        threads: Threads,
        resume: Resume | None = None,
    ) -> AsyncGenerator[Output, None]:
        """Compute one request; keep its whole state in local variables. Same rules as ``Engine.generate``."""


class PerRequestEngine(Engine):
    """Admits, runs and accounts ``PerRequestModel`` generators."""

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        assert isinstance(context.options, PerRequestOptions)
        self._admission = Admission(context.stage.name, context.options)
        self._threads = Threads(self._admission, context.options.threads)
        self._model: PerRequestModel = context.model_cls(context)
        self.resumable = self._model.resumable

    async def start(self) -> None:
        """Load the model in a thread."""
        await asyncio.get_running_loop().run_in_executor(None, self._model.load)

    async def generate(
        self, request: Request, inputs: Mapping[str, AsyncGenerator[Any, None]], resume: Resume | None = None
    ) -> AsyncGenerator[Output, None]:
        """See ``Engine.generate``."""
        generator = self._model.generate(request, inputs, self._threads, resume)
        async with self._admission.place(request), aclosing(generator) as outputs:
            async for output in outputs:
                yield output

    async def check_health(self) -> None:
        """See ``Engine.check_health``."""
        self._admission.check()

    def stats(self) -> EngineStats:
        """See ``Engine.stats``."""
        return self._admission.stats()

    def frame_rate(self) -> float | None:
        """See ``Engine.frame_rate``."""
        return self._model.frame_rate

    async def stop(self) -> None:
        """See ``Engine.stop``."""
        self._threads.stop()
