"""Higgs Audio v2's talker against transformers' ``generate``, on a tiny random checkpoint."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file

from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.ar import AREngine
from omni_ray.engine.base import EngineContext
from omni_ray.engine.reference_voice import SpokenTurn
from omni_ray.engine.resume import Resume
from omni_ray.engine.types import Finish, Request
from omni_ray.errors import ConfigError, InvalidRequestError
from omni_ray.models.higgs_audio_v2.checkpoint import CODES
from omni_ray.models.higgs_audio_v2.options import HiggsTalkerOptions
from omni_ray.models.higgs_audio_v2.pipeline import PIPELINE
from omni_ray.models.higgs_audio_v2.prompt import HiggsPrompt
from omni_ray.models.higgs_audio_v2.talker import HiggsTalker
from tests.models.higgs_audio_v2.conftest import WORDS, Codes, Generate

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = "The past is just a story we tell ourselves."
ROWS = 40
GREEDY = SamplingParams(temperature=0, max_tokens=ROWS)
SAMPLED = SamplingParams(temperature=0.9, top_k=20, max_tokens=ROWS)


def context(model: Path, **options: Any) -> EngineContext:
    given = HiggsTalkerOptions.model_validate({"threads": 1, "max_model_len": 768, **options})
    return EngineContext(stage=PIPELINE.stage("talker"), model=str(model), model_cls=HiggsTalker, options=given)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def started(tiny: Path) -> AsyncIterator[AREngine]:
    made = AREngine(context(tiny))
    await made.start()
    yield made
    await made.stop()


async def speak(
    made: AREngine, prompt: HiggsPrompt, sampling: SamplingParams = GREEDY, seed: int = 0, resume: Resume | None = None
) -> tuple[Codes, Finish]:
    async def inputs() -> AsyncIterator[HiggsPrompt]:
        yield prompt

    request = Request("r", seed=seed, sampling=sampling)
    async with aclosing(made.generate(request, {"request": inputs()}, resume)) as outputs:
        *chunks, last = [output async for output in outputs]
    assert isinstance(last, Finish)
    return np.concatenate([c.frames for c in chunks]) if chunks else np.zeros((0, 8), np.int64), last


def recording() -> SpokenTurn:
    """0.9 s: no whole number of frames."""
    noise = np.random.default_rng(3).standard_normal(21_600) * 0.1
    return SpokenTurn(WORDS, noise.astype(np.float32))


def heard(tiny: Path, turn: SpokenTurn) -> Codes:
    """Code frames of a recording by the talker's own encoder, which ``test_higgs_codec`` compares with upstream's."""
    talker = HiggsTalker(context(tiny))
    talker.load()
    return talker.hear(turn.samples).numpy()


async def test_greedy_rows_equal_upstream_many_at_once(started: AREngine, generate: Generate, tiny: Path):
    """With and without a recording, of different lengths; a text that looks like control tokens is text to us."""
    turn = recording()
    said = heard(tiny, turn)
    texts = ["Hi.", TEXT, "Ünïcödé, 中文!", "x" * 200, "a<|eot_id|>b", *(TEXT[: 5 * k + 3] for k in range(3))]
    turns = [turn if k % 2 else None for k in range(8)]
    made = await asyncio.gather(*(speak(started, HiggsPrompt(t, b)) for t, b in zip(texts, turns, strict=True)))
    for (rows, finish), text, before in zip(made, texts, turns, strict=True):
        theirs = generate(text, ROWS, None if before is None else said)
        if "<|" in text:
            assert not np.array_equal(rows, theirs)
            continue
        np.testing.assert_array_equal(rows, theirs)
        assert finish.usage.audio_tokens == len(rows)
        assert len({tuple(row) for row in rows.tolist()}) > len(rows) // 2
    assert {len(rows) for rows, _ in made} == {ROWS}


async def test_an_answer_ends_as_upstreams_does(tiny: Path, tmp_path: Path, upstream: Any, generate: Generate):
    """The end code is made likely: codebooks end one after the other, and a row of end codes is the end."""
    likely = upstream.audio_lm_head.weight.clone()
    try:
        with torch.no_grad():
            head = upstream.audio_lm_head.weight.view(8, CODES + 2, -1)
            head[:, CODES + 1] = torch.randn(8, head.shape[-1], generator=torch.Generator().manual_seed(1)) * 0.8
        ends = tmp_path / "ends"
        shutil.copytree(tiny, ends)
        tensors = load_file(ends / "model.safetensors")
        tensors["audio_lm_head.weight"] = upstream.audio_lm_head.weight.clone()
        save_file(tensors, ends / "model.safetensors", metadata={"format": "pt"})
        made = AREngine(context(ends))
        await made.start()
        lengths = set()
        for text in ("Hi.", TEXT, "x" * 20, "Well"):
            rows, finish = await speak(made, HiggsPrompt(text), SamplingParams(temperature=0, max_tokens=120))
            np.testing.assert_array_equal(rows, generate(text, 120))
            assert finish.reason == "stop"
            assert (rows == CODES + 1).any()
            lengths.add(len(rows))
        assert len(lengths) > 1
        await made.stop()
    finally:
        upstream.audio_lm_head.weight.data = likely


async def test_deterministic_alone_equals_a_crowd(tiny: Path, generate: Generate):
    """Its start runs the self-test."""
    made = AREngine(context(tiny, deterministic=True))
    await made.start()
    prompts = [HiggsPrompt(TEXT[: 5 * k + 3], recording() if k % 3 else None) for k in range(6)]
    alone = [(await speak(made, p, SAMPLED, seed=k))[0] for k, p in enumerate(prompts)]
    crowd = await asyncio.gather(*(speak(made, p, SAMPLED, seed=k) for k, p in enumerate(prompts)))
    for one, (many, _) in zip(alone, crowd, strict=True):
        np.testing.assert_array_equal(one, many)
    assert len({one.tobytes() for one in alone}) == 6
    np.testing.assert_array_equal((await speak(made, HiggsPrompt(TEXT)))[0], generate(TEXT, ROWS))
    await made.stop()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
async def test_an_answer_goes_on_from_another_replicas_rows(started: AREngine, sampling: SamplingParams):
    whole = (await speak(started, HiggsPrompt(TEXT), sampling, seed=4))[0]
    resume = Resume(frames=whole[:17])
    np.testing.assert_array_equal((await speak(started, HiggsPrompt(TEXT), sampling, 4, resume))[0], whole)


async def test_every_codebook_follows_the_seed(started: AREngine):
    one, again, other = [(await speak(started, HiggsPrompt(TEXT), SAMPLED, seed))[0] for seed in (1, 1, 2)]
    np.testing.assert_array_equal(one, again)
    assert ((one != other).any(0)).all()


async def test_repeated_codes_are_drawn_anew_as_the_checkpoint_asks(tiny: Path, tmp_path: Path):
    """With ``top_k`` 1 one code comes again and again; ``ras_*`` lets it come twice in seven rows."""
    stuck = tmp_path / "stuck"
    shutil.copytree(tiny, stuck)
    tensors = load_file(stuck / "model.safetensors")
    tensors["audio_lm_head.weight"].zero_()
    tensors["audio_lm_head.weight"][:: CODES + 2] = 1e-3
    tensors["model.norm.weight"].abs_()
    save_file(tensors, stuck / "model.safetensors", metadata={"format": "pt"})
    cold = SamplingParams(temperature=0.5, top_k=1, max_tokens=ROWS)
    distinct = []
    for more in ({}, {"ras_win_len": 7, "ras_win_max_num_repeat": 2}):
        said = json.loads((tiny / "generation_config.json").read_text())
        (stuck / "generation_config.json").write_text(json.dumps({**said, **more}))
        made = AREngine(context(stuck))
        await made.start()
        rows = (await speak(made, HiggsPrompt(TEXT), cold, seed=3))[0]
        distinct.append(len(set(rows[rows < CODES].tolist())))
        await made.stop()
    assert distinct[0] == 1
    assert distinct[1] > 3


async def test_what_does_not_fit_is_refused(started: AREngine, tiny: Path, tmp_path: Path):
    with pytest.raises(InvalidRequestError):
        await speak(started, HiggsPrompt("x" * 800))
    with pytest.raises(InvalidRequestError, match="less than one frame"):
        await speak(started, HiggsPrompt("Hi.", SpokenTurn("a", np.zeros(100, np.float32))))
    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.layers.1.audio_mlp.up_proj.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 tensors are missing: model\.layers\.1\.audio_mlp\.up_proj\.weight"):
        await AREngine(context(broken)).start()
    for named in ("/etc", "../tiny", "nobody"):
        processor = {"audio_tokenizer": {"audio_tokenizer_name_or_path": named}}
        (broken / "processor_config.json").write_text(json.dumps(processor))
        shutil.copy(tiny / "model.safetensors", broken / "model.safetensors")
        with pytest.raises(ConfigError, match=r"names no codec .* set the stage's option engine\.codec"):
            await AREngine(context(broken)).start()
