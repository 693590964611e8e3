"""The torch autoregressive engine: continuous batching over static KV slots. Knows no model and no tokenizer.

This module is its asynchronous face; the work happens in ``ar_loop`` on one thread, and results cross to the event loop
with ``call_soon_threadsafe`` as they are made.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Final

from omni_ray.engine.admission import Admission
from omni_ray.engine.ar_loop import DecodeLoop, Row
from omni_ray.engine.ar_model import ARModel
from omni_ray.engine.base import Engine, EngineContext, EngineStats, Resume
from omni_ray.engine.options import AROptions
from omni_ray.engine.types import Finish, Output, Request
from omni_ray.errors import StageFailedError

__all__ = ["AREngine", "ARModel"]

STOP_WAIT_S: Final = 5.0


class AREngine(Engine):
    """Computes a text stage token by token: the first form of the AR engine, without CUDA graphs.

    One source that yields exactly one prompt, whatever type ``ARModel.encode`` takes. Sampling as ``Sampler`` says;
    ``max_tokens`` is clamped to what ``max_model_len`` leaves. Chunks carry new text that is valid UTF-8 and ends
    before any stop string. Usage counts every drawn token, the stop token too, as vLLM does.
    """

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        options = context.options
        assert isinstance(options, AROptions)
        self._name = context.stage.name
        self._admission = Admission(self._name, options)
        model: ARModel = context.model_cls(context)
        self._decode_loop = DecodeLoop(self._name, model, options.max_num_seqs, options.max_model_len)

    async def start(self) -> None:
        """Start the thread and load the model on it."""
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[None] = loop.create_future()

        def report(error: BaseException | None) -> None:
            if loaded.done():  # whoever called `start` gave up
                return
            if error is None:
                loaded.set_result(None)
            else:
                loaded.set_exception(error)

        self._decode_loop.start(lambda error: loop.call_soon_threadsafe(report, error))
        await loaded

    async def generate(
        self, request: Request, inputs: Mapping[str, AsyncIterator[Any]], resume: Resume | None = None
    ) -> AsyncIterator[Output]:
        """See ``Engine.generate``.

        Raises:
            InvalidRequestError: the prompt does not fit in ``max_model_len`` with one token of answer.
            StageFailedError: the model gave NaN, the engine was stopped, or there was not exactly one prompt.
        """
        async with self._admission.place(request):
            prompt = await self._only_input(inputs)
            outputs: asyncio.Queue[Output | Exception] = asyncio.Queue()
            with ExitStack() as busy:
                row = Row(request, prompt, self._delivery(outputs, busy))
                try:
                    self._decode_loop.submit(row)
                    busy.enter_context(self._admission.computing())
                    while True:
                        output = await outputs.get()
                        if isinstance(output, Exception):
                            raise output
                        yield output
                        if isinstance(output, Finish):
                            return
                finally:
                    row.cancelled = True

    def _delivery(self, outputs: asyncio.Queue[Output | Exception], busy: ExitStack) -> Any:
        """A function for the loop's thread that carries outputs to the running event loop."""
        event_loop = asyncio.get_running_loop()

        def arrive(new: Sequence[Output | Exception]) -> None:
            self._admission.progressed()
            for output in new:
                outputs.put_nowait(output)
                if isinstance(output, Finish | Exception):
                    busy.close()  # a slow reader of what was made is no hung engine

        def deliver(new: Sequence[Output | Exception]) -> None:
            if not event_loop.is_closed():
                event_loop.call_soon_threadsafe(arrive, new)

        return deliver

    async def _only_input(self, inputs: Mapping[str, AsyncIterator[Any]]) -> Any:
        prompts = [prompt for source in inputs.values() async for prompt in source]
        if len(prompts) != 1:
            raise StageFailedError(f"stage {self._name} takes exactly one prompt, got {len(prompts)}")
        return prompts[0]

    async def check_health(self) -> None:
        """See ``Engine.check_health``."""
        self._decode_loop.check()
        self._admission.check()

    def stats(self) -> EngineStats:
        """See ``Engine.stats``."""
        return self._admission.stats()

    async def stop(self) -> None:
        """End the thread after its running step; running requests fail."""
        await asyncio.to_thread(self._decode_loop.stop, STOP_WAIT_S)
