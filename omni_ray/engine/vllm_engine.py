"""vLLM as the engine of a text stage, through ``AsyncLLM``. Knows no model: what goes in and out is ``VLLMModel``'s.

vLLM batches and samples; stop strings, text and positions are ours (``TextAnswer``), the same as the torch engine's.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

from vllm import SamplingParams as VLLMSamplingParams
from vllm.v1.engine.exceptions import EngineDeadError

from omni_ray.engine.admission import Admission
from omni_ray.engine.base import Engine, EngineContext, EngineStats
from omni_ray.engine.collector import uncollected
from omni_ray.engine.prompts import only_prompt, room_for_answer
from omni_ray.engine.resume import Resume
from omni_ray.engine.text_answer import TextAnswer
from omni_ray.engine.types import Finish, Output, Request, TextChunk, Usage
from omni_ray.engine.vllm_compat import HiddenRows
from omni_ray.engine.vllm_model import VLLMModel, VLLMPrompt
from omni_ray.engine.vllm_options import VLLMOptions
from omni_ray.engine.vllm_sampling import vllm_sampling
from omni_ray.engine.vllm_start import StartedVLLM, start_vllm
from omni_ray.engine.vllm_warm_up import RandomPrompts, WarmUpPrompt, warm_up_steps
from omni_ray.errors import ConfigError, EngineDiedError, InvalidRequestError, OmniRayError, StageFailedError

logger = logging.getLogger(__name__)


class VLLMEngine(Engine):
    """Computes a text stage with vLLM; chunks, stops and usage are as the torch engine's.

    A seed fixes what vLLM draws for a request, but not the last bits of its logits, which depend on what else is in the
    batch: equal seeds give equal tokens alone, and nearly always in a crowd. ``deterministic`` is vLLM's own mode
    (``VLLM_BATCH_INVARIANT``; GPUs only).

    A prompt without media goes out before it is computed, so that the next stage can begin with it too. An answer that
    is taken over goes on behind its recorded tokens; if it is sampled, not with those that its seed gave before.
    """

    resumable = "replay"

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        options = context.options
        assert isinstance(options, VLLMOptions)
        self._name = context.stage.name
        self._options = options
        self._admission = Admission(self._name, options)
        model = context.model_cls(context)
        if not isinstance(model, VLLMModel):
            raise ConfigError([f"stage {self._name!r}: {type(model).__name__} is no VLLMModel"])
        self._model: VLLMModel = model
        self._vllm: StartedVLLM | None = None
        self._sign: asyncio.Task[None] | None = None
        self._rows: HiddenRows | None = None
        self._longest = options.max_model_len

    async def start(self) -> None:
        """Read the checkpoint's tokenizer, start vLLM's processes, load the weights and warm up.

        Raises:
            ConfigError: with vLLM's own message if it does not start, or fails while it warms up; or it was not ready
                within ``start_timeout_s``.
        """
        clock, limit = asyncio.get_running_loop().time, self._options.start_timeout_s
        end = clock() + limit
        with uncollected():  # tokenizers and imports; the weights are loaded in vLLM's process, never in this one
            checkpoint = await asyncio.to_thread(self._model.load)
            self._longest = checkpoint.longest(self._longest)
            self._vllm = await asyncio.to_thread(
                start_vllm,
                self.context.stage,
                self._options,
                checkpoint,
                self.context.load_format,
                max(0, end - clock()),
            )
        try:
            async with asyncio.timeout_at(end):
                if self._options.tensor_parallel_size > 1:
                    await self._vllm.watch_ranks()
                if self._options.warm_up:
                    await self._warm_up(self._vllm)
        except Exception as error:  # whatever it is: what a warm-up fails with, requests would fail with
            why = self._vllm.why_dead() if isinstance(error, EngineDeadError) else f"{error!r}"
            if isinstance(error, TimeoutError):
                why = f"not ready within start_timeout_s, {limit:g} s"
            await self.stop()
            raise ConfigError([f"stage {self._name!r}: vLLM failed while it warmed up: {why}"]) from error
        if checkpoint.keeps_rows:  # from here on: no rows of a warm-up
            self._rows = HiddenRows(self._vllm.llm)
            await self._rows.attach()

    async def _warm_up(self, started: StartedVLLM) -> None:
        lengths, crowd = started.warm_up_sizes(self._longest)
        steps = warm_up_steps(lengths, crowd, self.context.stage.sampling)
        prompts = RandomPrompts(self._model.detokenizer(), started.llm.model_config.get_vocab_size())
        self.context.progress(f"{self._name}: warming vLLM up with {sum(map(len, steps))} prompts")
        for number, step in enumerate(steps):
            await asyncio.gather(*(self._warmed(prompts.ids(p.length), p, f"{number}-{i}") for i, p in enumerate(step)))
        await started.llm.reset_prefix_cache()

    async def _warmed(self, ids: Sequence[int], prompt: WarmUpPrompt, name: str) -> None:
        rendered = await self._rendered(VLLMPrompt.of_text(ids), ())
        request = Request(f"warm-up-{name}", seed=0, sampling=prompt.sampling)
        async with aclosing(self._tokens(rendered, self._sampling(request, prompt.limit), request.request_id)) as news:
            async for _ in news:
                pass

    async def generate(
        self, request: Request, inputs: Mapping[str, AsyncGenerator[Any, None]], resume: Resume | None = None
    ) -> AsyncGenerator[Output, None]:
        """See ``Engine.generate``.

        Raises:
            InvalidRequestError: the prompt does not fit in ``max_model_len`` with one token of answer, or vLLM refuses
                it.
            EngineDiedError: vLLM's processes died.
            StageFailedError: vLLM failed, or there was no prompt or one too many.
        """
        async with self._admission.place(request):
            prompt = await only_prompt(self._name, inputs)
            outputs: asyncio.Queue[Output | Exception] = asyncio.Queue()
            # A task of its own: a slow reader of what was made must not look like a hung engine.
            answering = asyncio.create_task(self._answer(request, prompt, resume, outputs))
            try:
                while True:
                    output = await outputs.get()
                    if isinstance(output, Exception):
                        raise output
                    yield output
                    if isinstance(output, Finish):
                        return
            finally:
                answering.cancel()
                await asyncio.wait([answering])

    async def _answer(
        self, request: Request, prompt: Any, resume: Resume | None, outputs: "asyncio.Queue[Output | Exception]"
    ) -> None:
        """Put everything that comes of a prompt into ``outputs``; the last thing is a ``Finish`` or an error."""
        with self._admission.computing():
            try:
                async with aclosing(self._compute(request, prompt, resume or Resume())) as made:
                    async for output in made:
                        self._admission.progressed()
                        outputs.put_nowait(output)
            except OmniRayError as error:
                outputs.put_nowait(error)
            except EngineDeadError:
                outputs.put_nowait(EngineDiedError(f"the vLLM processes of stage {self._name} died", stage=self._name))
            except ValueError as error:
                outputs.put_nowait(InvalidRequestError(str(error), "messages"))
            except Exception as error:
                logger.exception("stage %s: vLLM failed, request %s", self._name, request.request_id)
                outputs.put_nowait(StageFailedError(f"stage {self._name} failed: {type(error).__name__}"))

    async def _compute(self, request: Request, given: Any, resume: Resume) -> AsyncGenerator[Output, None]:
        prompt = await asyncio.to_thread(self._model.encode, given)
        room = room_for_answer(len(prompt.ids), self._longest)
        limit = min(request.sampling.max_tokens or room, room)
        answer = TextAnswer(self._model.detokenizer(), self._model.stop_ids, request.sampling, limit)
        known = resume.token_ids
        rendered = await self._rendered(prompt, known)
        recorded: list[Output] = [*(self._chunks(known, answer) if resume.finish is None else resume.text)]
        finish = resume.finish or self._finish(prompt, answer)
        rows_wanted = len(prompt.wanted) > 0
        if not rows_wanted:
            for output in (*self._model.prompt_outputs(prompt, None, limit), *recorded):
                yield output
        name = f"{request.request_id}-{request.attempt}"
        # of an answer that is all recorded only the rows are missing: the prompt is computed for them, and one token
        sampling = self._sampling(request, 1 if finish is not None else limit - len(known))
        async with AsyncExitStack() as over:
            if rows_wanted:
                self._kept_rows().expect(name)
                over.callback(self._kept_rows().drop, name)
            news = await over.enter_async_context(aclosing(self._tokens(rendered, sampling, name)))
            while finish is None or rows_wanted:
                tokens = await anext(news, None)
                if tokens is None:
                    raise StageFailedError(f"vLLM ended an answer of stage {self._name} at token {answer.count}")
                if rows_wanted:
                    rows = await self._kept_rows().fetch(name, prompt.wanted)
                    rows_wanted = False
                    for output in (*self._model.prompt_outputs(prompt, rows, limit), *recorded):
                        yield output
                for chunk in self._chunks(tokens, answer) if finish is None else ():
                    yield chunk
                finish = finish or self._finish(prompt, answer)
        yield finish

    async def _tokens(
        self, rendered: Any, sampling: VLLMSamplingParams, name: str
    ) -> AsyncGenerator[Sequence[int], None]:
        """What vLLM draws, as it draws it; closing it ends the request in vLLM."""
        async with aclosing(self._alive().llm.generate(rendered, sampling, name)) as news:
            async for new in news:
                made = new.outputs[0]
                if made.finish_reason in ("abort", "error"):
                    raise StageFailedError(f"vLLM gave up an answer of stage {self._name}: {made.finish_reason}")
                yield made.token_ids

    def _finish(self, prompt: VLLMPrompt, answer: TextAnswer) -> Finish | None:
        return answer.reason and Finish(answer.reason, Usage(len(prompt.ids), answer.count))

    def _kept_rows(self) -> HiddenRows:
        if self._rows is None:
            raise StageFailedError(f"stage {self._name} keeps no hidden rows")
        return self._rows

    def _chunks(self, tokens: Sequence[int], answer: TextAnswer) -> list[TextChunk]:
        """The text of new tokens. Those behind a stop string are dropped: vLLM knows nothing of ours."""
        chunks = []
        for token in tokens:
            if answer.reason is None:
                chunks += answer.add(token)
        return chunks

    async def _rendered(self, prompt: VLLMPrompt, known: Sequence[int]) -> Any:
        """The prompt and the tokens that are known already, as vLLM takes it; media are processed on its own threads.

        Raises:
            StageFailedError: vLLM expands the placeholders otherwise than the model's side.
        """
        asked: dict[str, Any] = {"prompt_token_ids": [*prompt.given, *known]}
        if prompt.media:
            asked["multi_modal_data"] = {kind: list(items) for kind, items in prompt.media.items()}
        if len(prompt.wanted):
            asked["cache_salt"] = secrets.token_hex(16)  # rows of cached positions would never be computed
        (rendered,) = await self._alive().llm.renderer.render_cmpl_async([asked])
        if list(rendered["prompt_token_ids"]) != [*prompt.ids, *known]:
            raise StageFailedError(
                f"vLLM lays a prompt of stage {self._name} out in {len(rendered['prompt_token_ids'])} positions, "
                f"not in the expected {len(prompt.ids) + len(known)}"
            )
        return rendered

    def _sampling(self, request: Request, limit: int) -> VLLMSamplingParams:
        return vllm_sampling(request.sampling, request.seed, limit, self._model.stop_ids)

    def _alive(self) -> StartedVLLM:
        if self._vllm is None:
            raise StageFailedError(f"stage {self._name} is stopped")
        return self._vllm

    async def check_health(self) -> None:
        """See ``Engine.check_health``.

        Each call asks vLLM's core for a sign of life, which it gives between two steps; one that does not come within
        ``stall_s`` is a hang, also where all clients gave up and nothing is in hand any more.
        """
        alive = self._alive()
        try:
            await alive.llm.check_health()
        except EngineDeadError as error:
            raise EngineDiedError(f"stage {self._name}: vLLM died: {alive.why_dead()}", stage=self._name) from error
        if self._sign is None or self._sign.done():
            self._sign = asyncio.create_task(self._sign_of_life(alive))
        self._admission.check()

    async def _sign_of_life(self, alive: StartedVLLM) -> None:
        with self._admission.calling():
            try:
                await alive.llm.is_sleeping()  # any question to the core itself would do
            except EngineDeadError:
                logger.warning("stage %s: vLLM died before it gave a sign of life", self._name)

    def stats(self) -> EngineStats:
        """See ``Engine.stats``."""
        return self._admission.stats()

    async def stop(self) -> None:
        """End vLLM's processes; running requests fail."""
        if self._sign is not None:
            self._sign.cancel()
        if self._vllm is not None:
            started, self._vllm, self._rows = self._vllm, None, None
            await asyncio.to_thread(started.stop)
