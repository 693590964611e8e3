"""One coroutine per request: the engine for models that compute a request on their own, without batching.

The model is an async generator over its inputs; its blocking calls run in a small thread pool, never on the event
loop. Parallelism beyond ``threads`` comes from replicas.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import aclosing
from typing import Any, Literal, ParamSpec, TypeVar

from omni_ray.engine.admission import Admission
from omni_ray.engine.base import Engine, EngineContext, EngineStats
from omni_ray.engine.options import PerRequestOptions
from omni_ray.engine.resume import Resume
from omni_ray.engine.types import Output, Request

P = ParamSpec("P")
R = TypeVar("R")


class Threads:
    """Runs a model's blocking calls off the event loop and tells the engine that work is in hand meanwhile."""

    def __init__(self, admission: Admission, threads: int) -> None:
        self._admission = admission
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="model")

    async def run(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """``function(*args, **kwargs)`` in the pool.

        When the caller gives up, a call that runs stays in hand until it returns: it holds its thread, and a hang must
        show. One that still waits for a thread never runs.
        """
        call = self._pool.submit(function, *args, **kwargs)
        in_hand = asyncio.ensure_future(self._in_hand(call))
        try:
            return await asyncio.shield(in_hand)
        finally:
            call.cancel()

    async def _in_hand(self, call: Future[R]) -> R:
        with self._admission.computing():
            return await asyncio.wrap_future(call)

    async def sleep(self, seconds: float) -> None:
        """Compute time that is only waited for (fault knobs, remote models): counts as work in hand."""
        with self._admission.computing():
            await asyncio.sleep(seconds)

    def stop(self) -> None:
        """Let running calls finish and refuse new ones."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class PerRequestModel(ABC):
    """The model side: built in ``Engine.start`` as ``model_cls(context)``.

    Attributes:
        resumable: see ``Engine``. A model that says ``replay`` makes the same outputs of the same inputs, bit for bit,
            in every replica.
    """

    resumable: Literal["none", "replay"] = "none"

    def __init__(self, context: EngineContext) -> None:
        self.context = context

    @abstractmethod
    def load(self) -> None:
        """Load weights and warm up; blocking, runs in a thread."""

    @abstractmethod
    def generate(
        self,
        request: Request,
        inputs: Mapping[str, AsyncIterator[Any]],
        threads: Threads,
        resume: Resume | None = None,
    ) -> AsyncIterator[Output]:
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
        self, request: Request, inputs: Mapping[str, AsyncIterator[Any]], resume: Resume | None = None
    ) -> AsyncIterator[Output]:
        """See ``Engine.generate``."""
        generator = _closable(self._model.generate(request, inputs, self._threads, resume))
        async with self._admission.place(request), aclosing(generator) as outputs:
            async for output in outputs:
                self._admission.progressed()
                yield output

    async def check_health(self) -> None:
        """See ``Engine.check_health``."""
        self._admission.check()

    def stats(self) -> EngineStats:
        """See ``Engine.stats``."""
        return self._admission.stats()

    async def stop(self) -> None:
        """See ``Engine.stop``."""
        self._threads.stop()


def _closable(generator: AsyncIterator[Output]) -> Any:
    """Typed loosely: ``aclosing`` wants an ``aclose`` that ``AsyncIterator`` lacks."""
    return generator
