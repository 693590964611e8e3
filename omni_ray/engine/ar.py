"""The torch autoregressive engine: continuous batching over static KV slots. Knows no model and no tokenizer.

This module is its asynchronous face; the work happens in ``ar_loop`` on one thread, ``ar_stream`` is the way between.
Prompts that may take long are encoded on a second thread.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import replace
from typing import Any, Final

import torch

from omni_ray.engine.admission import Admission
from omni_ray.engine.ar_frames import FrameSteps
from omni_ray.engine.ar_loop import DecodeLoop
from omni_ray.engine.ar_model import ARModel, CodecLM, SlotModel
from omni_ray.engine.ar_row import Mail, Row, Steps
from omni_ray.engine.ar_schedule import RowSchedule
from omni_ray.engine.ar_stream import RowStream
from omni_ray.engine.ar_text import TextSteps
from omni_ray.engine.base import Engine, EngineContext, EngineStats, only_input
from omni_ray.engine.options import AROptions, CodecLMOptions
from omni_ray.engine.prompts import only_prompt
from omni_ray.engine.resume import Resume
from omni_ray.engine.threads import Threads
from omni_ray.engine.types import CodeFrameChunk, Finish, Output, Request
from omni_ray.errors import ConfigError, StageFailedError

__all__ = ["AREngine", "ARModel", "CodecLM"]

STOP_WAIT_S: Final = 5.0


class AREngine(Engine):
    """Computes a text stage token by token, or a codec stage frame by frame, without CUDA graphs.

    A text model (``ARModel``) takes exactly one prompt. Sampling as ``Sampler`` says; ``max_tokens`` is clamped to what
    ``max_model_len`` leaves. Chunks carry new text that is valid UTF-8 and ends before any stop string. Usage counts
    every drawn token, the stop token too, as vLLM does.

    A codec LM (``CodecLM``) takes a prompt, then feeds, from one source, while it runs; a row whose next unit has not
    come waits, and the end of the source is the end of its feed. Chunks carry one frame or more, by ``FrameSteps``'
    limits; the source is closed as soon as the row is over.

    A request that goes on after its replica died gets its record back: tokens in order behind the prompt's outputs,
    frames at once. A row that had ended makes no step. See ``Steps`` for how exact it is.
    """

    resumable = "replay"
    reads_ahead = True

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        options = context.options
        assert isinstance(options, AROptions)
        self._name = context.stage.name
        self._admission = Admission(self._name, options)
        model: SlotModel = context.model_cls(context)
        self._model = model
        self._fed = isinstance(model, CodecLM)
        self._encoding = Threads(self._admission, 1, f"encode-{self._name}")
        self._steps = _steps(self._name, model, options)
        self._decode_loop = self._loop_of(self._steps, options)

    def _loop_of(self, steps: Steps, options: AROptions) -> DecodeLoop:
        slots, deterministic = options.max_num_seqs, options.deterministic
        return DecodeLoop(RowSchedule(self._name, steps, slots, deterministic, self._post, self._busy))

    @contextmanager
    def _busy(self) -> Iterator[None]:
        """Held around each call of the loop's thread that computes; one that returns got on."""
        with self._admission.calling():
            yield
        self._admission.progressed()

    async def start(self) -> None:
        """Start the thread and load the model on it.

        Raises:
            ConfigError: ``deterministic`` is asked for and this machine cannot give it (``ar_selftest``).
        """
        loop = self._event_loop = asyncio.get_running_loop()
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

    def _post(self, mail: Mail) -> None:
        """On the loop's thread: hand a step's mail over to the event loop, which is woken once."""
        if not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(_deliver, mail)

    async def generate(
        self, request: Request, inputs: Mapping[str, AsyncGenerator[Any, None]], resume: Resume | None = None
    ) -> AsyncGenerator[Output, None]:
        """See ``Engine.generate``.

        Raises:
            InvalidRequestError: the prompt does not fit in ``max_model_len`` with one token of answer.
            StageFailedError: the model gave NaN, the engine was stopped, or there was no prompt or one too many.
        """
        if resume is not None and resume.frames is not None:
            yield CodeFrameChunk(0, resume.frames)
        if self._fed and resume is not None and resume.finish is not None:
            yield resume.finish
            return
        async with self._admission.place(request):
            with ExitStack() as busy:
                stream = RowStream(request, resume, self._decode_loop, self._admission, busy)
                # One task reads the source from its first item to its end: generators may hold timeouts and tasks.
                reader = asyncio.create_task(self._read(stream, inputs))
                try:
                    while True:
                        output = await stream.outputs.get()
                        if isinstance(output, Exception):
                            raise output
                        if resume is not None and not resume.agrees(output):
                            raise StageFailedError(f"stage {self._name} answers otherwise than the replica that died")
                        if resume is None or not resume.has_frame(output):
                            yield output
                        if isinstance(output, Finish):
                            return
                finally:
                    stream.close()
                    reader.cancel()
                    await asyncio.wait([reader])

    async def _read(self, stream: RowStream, inputs: Mapping[str, AsyncGenerator[Any, None]]) -> None:
        """Carry the inputs to the row; whatever goes wrong with them ends it."""
        try:
            if self._fed:
                await self._read_feed(stream, inputs)
            else:
                row = stream.row(await only_prompt(self._name, inputs))
                self._decode_loop.check()
                await self._encoding.run(self._prepare, row)
                stream.open(row)
        except asyncio.CancelledError:
            stream.fail(StageFailedError(f"the input of stage {self._name} was cancelled"))
            raise
        except Exception as error:
            stream.fail(error)

    def _prepare(self, row: Row) -> None:
        """On the encoding thread, so that running rows go on."""
        with torch.inference_mode():
            self._steps.prepare(row)

    async def _read_feed(self, stream: RowStream, inputs: Mapping[str, AsyncGenerator[Any, None]]) -> None:
        async with aclosing(only_input(inputs)) as items:
            opened = False
            async for item in items:
                if opened:
                    stream.feed(item)
                else:
                    row = stream.row(item)
                    if self._steps.model.encodes_apart:
                        await self._encoding.run(self._prepare, row)
                    stream.open(row)
                    opened = True
            if not opened:
                raise StageFailedError(f"stage {self._name} got no prompt")
            stream.end()

    async def check_health(self) -> None:
        """See ``Engine.check_health``."""
        self._decode_loop.check()
        self._admission.check()

    def stats(self) -> EngineStats:
        """See ``Engine.stats``."""
        memory = {"kv_bytes": self._model.kv_bytes(), "encoder_bytes": self._model.encoder_bytes()}
        return replace(self._admission.stats(), **memory)

    def frame_rate(self) -> float | None:
        """See ``Engine.frame_rate``."""
        return self._model.frame_rate if isinstance(self._model, CodecLM) else None

    async def stop(self) -> None:
        """End the thread after its running step; running requests fail."""
        self._encoding.stop()
        await asyncio.to_thread(self._decode_loop.stop, STOP_WAIT_S)


def _deliver(mail: Mail) -> None:
    for row, news in mail:
        row.deliver(news)


def _steps(stage: str, model: SlotModel, options: AROptions) -> Steps:
    """What a step is, by the kind of model."""
    if isinstance(model, ARModel):
        return TextSteps(model, options)
    if not isinstance(model, CodecLM):
        raise ConfigError([f"stage {stage!r}: {type(model).__name__} is neither an ARModel nor a CodecLM"])
    if not isinstance(options, CodecLMOptions):
        raise ConfigError([f"stage {stage!r}: a codec LM needs engine_options CodecLMOptions, not {type(options)}"])
    return FrameSteps(model, options)
