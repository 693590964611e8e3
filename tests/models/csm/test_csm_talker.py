"""CSM's talker against transformers' ``CsmForConditionalGeneration.generate``, on a tiny random checkpoint."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.ar import AREngine
from omni_ray.engine.base import EngineContext
from omni_ray.engine.options import CodecLMOptions
from omni_ray.engine.reference_voice import SpokenTurn
from omni_ray.engine.resume import Resume
from omni_ray.engine.types import Finish, Request
from omni_ray.errors import ConfigError, InvalidRequestError
from omni_ray.models.csm.pipeline import PIPELINE
from omni_ray.models.csm.prompt import CsmPrompt
from omni_ray.models.csm.talker import CsmTalker
from tests.models.csm.conftest import WORDS, Generate

pytestmark = pytest.mark.asyncio(loop_scope="module")

Codes = NDArray[np.int64]
TEXT = "The past is just a story we tell ourselves."
FRAMES = 40
GREEDY = SamplingParams(temperature=0, max_tokens=FRAMES)
SAMPLED = SamplingParams(temperature=0.9, top_k=20, max_tokens=FRAMES)


def engine(model: Path, **options: Any) -> AREngine:
    given = CodecLMOptions.model_validate({"threads": 1, "max_model_len": 512, **options})
    stage = PIPELINE.stage("talker")
    return AREngine(EngineContext(stage=stage, model=str(model), model_cls=CsmTalker, options=given))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def started(tiny: Path) -> AsyncIterator[AREngine]:
    made = engine(tiny)
    await made.start()
    yield made
    await made.stop()


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def deterministic(tiny: Path) -> AsyncIterator[AREngine]:
    """Its start runs the self-test."""
    made = engine(tiny, deterministic=True)
    await made.start()
    yield made
    await made.stop()


async def speak(
    made: AREngine, prompt: CsmPrompt, sampling: SamplingParams = GREEDY, seed: int = 0, resume: Resume | None = None
) -> tuple[Codes, Finish]:
    async def inputs() -> AsyncIterator[CsmPrompt]:
        yield prompt

    request = Request("r", seed=seed, sampling=sampling)
    async with aclosing(made.generate(request, {"request": inputs()}, resume)) as outputs:
        *chunks, last = [output async for output in outputs]
    assert isinstance(last, Finish)
    starts = np.cumsum([0, *(len(c.frames) for c in chunks)])
    assert [c.position for c in chunks] == starts[:-1].tolist()
    return np.concatenate([c.frames for c in chunks]) if chunks else np.zeros((0, 8), np.int64), last


@pytest.mark.parametrize("text", ["Hi.", TEXT, "Ünïcödé, 中文 and <|end_of_text|>?", "x" * 200])
async def test_greedy_codes_equal_upstream(started: AREngine, generate: Generate, text: str):
    """``<|end_of_text|>`` written by a client is text to us; upstream's processor would take it for the end."""
    codes, finish = await speak(started, CsmPrompt(text, "0"))
    if "<|" in text:
        assert not np.array_equal(codes, generate(text, FRAMES))
        assert finish.usage.audio_tokens == FRAMES
        return
    np.testing.assert_array_equal(codes, generate(text, FRAMES))
    assert finish == Finish("length", finish.usage)
    assert len({tuple(frame) for frame in codes.tolist()}) > FRAMES // 2


async def test_a_recording_comes_before_the_text_as_in_upstreams_conversations(
    started: AREngine, generate: Generate, recording: NDArray[np.float32]
):
    codes, _ = await speak(started, CsmPrompt(TEXT, "3", SpokenTurn(WORDS, recording)))
    np.testing.assert_array_equal(codes, generate(TEXT, FRAMES, recording, "3"))
    assert not np.array_equal(codes, generate(TEXT, FRAMES, None, "3"))


async def test_many_at_once_equal_upstream(started: AREngine, generate: Generate, recording: NDArray[np.float32]):
    texts = [TEXT[: 5 * k + 3] for k in range(8)]
    turns = [SpokenTurn(WORDS, recording) if k % 2 else None for k in range(8)]
    made = await asyncio.gather(*(speak(started, CsmPrompt(t, "0", b)) for t, b in zip(texts, turns, strict=True)))
    for (codes, _), text, turn in zip(made, texts, turns, strict=True):
        np.testing.assert_array_equal(codes, generate(text, FRAMES, recording if turn else None))


async def test_deterministic_alone_equals_a_crowd(deterministic: AREngine, recording: NDArray[np.float32]):
    prompts = [CsmPrompt(TEXT[: 5 * k + 3], "0", SpokenTurn(WORDS, recording) if k % 3 else None) for k in range(8)]
    alone = [(await speak(deterministic, p, SAMPLED, seed=k))[0] for k, p in enumerate(prompts)]
    crowd = await asyncio.gather(*(speak(deterministic, p, SAMPLED, seed=k) for k, p in enumerate(prompts)))
    for one, (many, _) in zip(alone, crowd, strict=True):
        np.testing.assert_array_equal(one, many)
    assert len({one.tobytes() for one in alone}) == 8


async def test_deterministic_greedy_equals_upstream(deterministic: AREngine, generate: Generate):
    np.testing.assert_array_equal((await speak(deterministic, CsmPrompt(TEXT, "0")))[0], generate(TEXT, FRAMES))


async def test_every_codebook_follows_seed_and_temperature(started: AREngine):
    one, again, other = [(await speak(started, CsmPrompt(TEXT, "0"), SAMPLED, seed))[0] for seed in (1, 1, 2)]
    greedy = (await speak(started, CsmPrompt(TEXT, "0")))[0]
    np.testing.assert_array_equal(one, again)
    assert ((one != other).any(0)).all()
    assert ((one != greedy).any(0)).all()
    assert one.max() < 32  # what the codec has vectors for


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
async def test_an_answer_goes_on_from_another_replicas_frames(started: AREngine, sampling: SamplingParams):
    whole = (await speak(started, CsmPrompt(TEXT, "0"), sampling, seed=4))[0]
    resume = Resume(frames=whole[:17])
    np.testing.assert_array_equal((await speak(started, CsmPrompt(TEXT, "0"), sampling, 4, resume))[0], whole)


async def test_the_text_bounds_the_sound(tiny: Path):
    """C23: a model that misses its end would talk until the cache is full."""
    made = engine(tiny, base_frames=5, frames_per_unit=2)
    await made.start()
    codes, finish = await speak(made, CsmPrompt("abc", "0"), SamplingParams(temperature=0))
    assert (len(codes), finish.reason) == (5 + 2 * 3, "length")
    assert (await speak(made, CsmPrompt("", "0")))[1].reason == "stop"
    await made.stop()


def changed(tiny: Path, out: Path, name: str, value: Any) -> Path:
    """The checkpoint with a tensor replaced, or left out for None."""
    shutil.copytree(tiny, out)
    tensors = load_file(out / "model.safetensors")
    if value is None:
        del tensors[name]
    else:
        tensors[name] = value(tensors[name])
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


async def test_a_frame_of_end_codes_is_the_end(tiny: Path, tmp_path: Path):
    """Upstream looks at all codebooks but the last; the frame itself is no sound."""
    ends = changed(tiny, tmp_path / "ends", "lm_head.weight", torch.zeros_like)
    tensors = load_file(ends / "model.safetensors")
    tensors["depth_decoder.codebooks_head.weight"][:-1] = 0
    save_file(tensors, ends / "model.safetensors", metadata={"format": "pt"})
    made = engine(ends)
    await made.start()
    codes, finish = await speak(made, CsmPrompt(TEXT, "0"))
    assert (len(codes), finish.reason) == (0, "stop")
    await made.stop()


async def test_cancelling_frees_the_slot(started: AREngine, generate: Generate):
    async def inputs() -> AsyncIterator[CsmPrompt]:
        yield CsmPrompt(TEXT, "0")

    for _ in range(9):  # one more than there are slots
        request = Request("r", seed=0, sampling=SamplingParams(temperature=0))
        async with aclosing(started.generate(request, {"request": inputs()})) as outputs:
            async for _ in outputs:
                break
    assert (started.stats().running, started.stats().queued) == (0, 0)
    np.testing.assert_array_equal((await speak(started, CsmPrompt(TEXT, "0")))[0], generate(TEXT, FRAMES))


async def test_a_prompt_that_does_not_fit_is_refused(started: AREngine):
    with pytest.raises(InvalidRequestError):
        await speak(started, CsmPrompt("x" * 600, "0"))


@pytest.mark.parametrize("name", ["depth_decoder.codebooks_head.weight", "codec_model.encoder.layers.0.conv.weight"])
async def test_a_missing_tensor_stops_the_start(tiny: Path, tmp_path: Path, name: str):
    with pytest.raises(ConfigError, match=f"1 tensors are missing: {name}"):
        await engine(changed(tiny, tmp_path / "broken", name, None)).start()


async def test_tied_codebook_tables_may_be_written_once(tiny: Path, tmp_path: Path):
    """``tie_codebooks_embeddings``: a checkpoint may hold the depth decoder's table alone."""
    table = "backbone_model.embed_tokens.embed_audio_tokens.weight"
    made = engine(changed(tiny, tmp_path / "tied", table, None))
    await made.start()
    tied = (await speak(made, CsmPrompt(TEXT, "0")))[0]
    await made.stop()
    depth = load_file(tiny / "model.safetensors")["depth_decoder.model.embed_tokens.weight"]
    both = engine(changed(tiny, tmp_path / "both", table, lambda _: depth.clone()))
    await both.start()
    np.testing.assert_array_equal(tied, (await speak(both, CsmPrompt(TEXT, "0")))[0])
    await both.stop()


async def test_dummy_weights_need_none(tiny: Path, tmp_path: Path):
    bare = tmp_path / "bare"
    shutil.copytree(tiny, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    stage, options = PIPELINE.stage("talker"), CodecLMOptions(threads=1, max_model_len=256)
    made = AREngine(EngineContext(stage, str(bare), CsmTalker, options, load_format="dummy"))
    await made.start()
    assert len((await speak(made, CsmPrompt("Hi.", "0"), SamplingParams(temperature=1, max_tokens=3), 1))[0]) == 3
    await made.stop()
