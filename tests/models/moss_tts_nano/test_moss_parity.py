"""``moss_tts_nano`` on our own tiny remote-code checkpoint: exactly what its ``inference_stream`` yields."""

import json
import random
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from numpy.typing import NDArray

from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.base import EngineContext
from omni_ray.engine.generator import GeneratorEngine
from omni_ray.engine.types import AudioChunk, Finish, Request
from omni_ray.errors import ConfigError
from omni_ray.models.moss_tts_nano.checkpoint import make_tiny
from omni_ray.models.moss_tts_nano.model import MossTTSNano
from omni_ray.models.moss_tts_nano.options import MossOptions
from omni_ray.models.moss_tts_nano.pipeline import PIPELINE
from omni_ray.serve.resolve import AppArgs, resolve

pytestmark = pytest.mark.asyncio(loop_scope="module")

RATE = 48_000
SAMPLING = PIPELINE.stage("talker").sampling
TEXT = "A text of some words, long enough for several chunks."


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("moss") / "tiny"
    make_tiny(out)
    return out


def engine(model: Path, **options: Any) -> GeneratorEngine:
    given = MossOptions.model_validate({"trust_remote_code": True, **options})
    stage = PIPELINE.stage("talker")
    return GeneratorEngine(EngineContext(stage=stage, model=str(model), model_cls=MossTTSNano, options=given))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def started(tiny: Path) -> GeneratorEngine:
    made = engine(tiny)
    await made.start()
    return made


async def speak(made: GeneratorEngine, text: str, **fields: Any) -> tuple[NDArray[np.float32], Finish, int]:
    """Samples, the finish and how many chunks."""

    async def inputs() -> AsyncIterator[str]:
        yield text

    request = Request("r", **{"seed": 0, "sampling": SAMPLING, "speech_text": text, **fields})
    async with aclosing(made.generate(request, {"request": inputs()})) as outputs:
        *chunks, last = [output async for output in outputs]
    assert isinstance(last, Finish)
    assert all(isinstance(c, AudioChunk) and c.sample_rate == RATE for c in chunks)
    return np.concatenate([c.samples for c in chunks]), last, len(chunks)


@torch.inference_mode()
def upstream(tiny: Path, text: str, seed: int, frames: int = 375, do_sample: bool = True) -> NDArray[np.float32]:
    """The checkpoint's own generator, run as its authors would; the last event's sound, channels averaged."""
    from transformers import AutoModel, AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(tiny, trust_remote_code=True).eval()
    codec = AutoModel.from_pretrained(tiny / "audio_tokenizer", trust_remote_code=True).eval()
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    with tempfile.TemporaryDirectory() as scratch:
        events = list(
            lm.inference_stream(
                text=text, output_audio_path=f"{scratch}/x.wav", mode="continuation", prompt_text=None,
                prompt_audio_path=None, text_tokenizer_path=str(tiny), audio_tokenizer=codec, device="cpu", nq=None,
                max_new_frames=frames, do_sample=do_sample, use_kv_cache=True,
                audio_temperature=0.8 if do_sample else 1,
                audio_top_p=0.95, audio_top_k=25, audio_repetition_penalty=1.2,
            )
        )  # fmt: skip
    assert events[-1]["type"] == "result"
    sound: NDArray[np.float32] = events[-1]["waveform"].mean(0).numpy()
    return sound


@pytest.mark.parametrize("seed", [0, 7])
async def test_stream_equals_upstreams_result(started: GeneratorEngine, tiny: Path, seed: int):
    samples, finish, chunks = await speak(started, TEXT, seed=seed)
    assert chunks > 3
    np.testing.assert_array_equal(samples, upstream(tiny, TEXT, seed))
    assert np.sqrt((samples**2).mean()) > 0.01
    assert finish == Finish("stop", finish.usage)
    assert finish.usage.audio_tokens == len(TEXT) // 2 + 1


async def test_a_word_comes_as_upstreams_lone_result(started: GeneratorEngine, tiny: Path):
    samples, _, chunks = await speak(started, "Hi.")
    assert chunks == 1
    np.testing.assert_array_equal(samples, upstream(tiny, "Hi.", 0))


async def test_seeds_matter_and_temperature_0_is_greedy(started: GeneratorEngine, tiny: Path):
    greedy = SamplingParams(temperature=0, max_tokens=375)
    first = (await speak(started, TEXT, seed=1, sampling=greedy))[0]
    np.testing.assert_array_equal(first, (await speak(started, TEXT, seed=2, sampling=greedy))[0])
    np.testing.assert_array_equal(first, upstream(tiny, TEXT, 3, do_sample=False))
    assert not np.array_equal(first, (await speak(started, TEXT, seed=1))[0])


async def test_max_tokens_counts_frames(started: GeneratorEngine):
    samples, _, _ = await speak(started, TEXT, sampling=SamplingParams(max_tokens=6).over(SAMPLING))
    assert len(samples) == 6 * 3840


async def test_cut_exactly_at_max_audio_seconds(started: GeneratorEngine):
    samples, finish, _ = await speak(started, TEXT, max_audio_seconds=0.5)
    assert (len(samples), finish.reason) == (24_000, "length")


async def test_no_trust_no_start(tiny: Path):
    with pytest.raises(ConfigError, match=r"Python code inside the checkpoint; set stages\.talker\.engine\.trust_re"):
        await engine(tiny, trust_remote_code=False).start()


@pytest.mark.parametrize("place", ["", "audio_tokenizer"])
async def test_a_missing_tensor_stops_the_start(tiny: Path, tmp_path: Path, place: str):
    """Otherwise ``from_pretrained`` draws it at random and the voice is noise."""
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    file = broken / place / "model.safetensors"
    tensors = load_file(file)
    name = sorted(tensors)[0]
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=f"missing_keys .*{name}"):
        await engine(broken).start()


async def test_a_tensor_of_nan_stops_the_start(tiny: Path, tmp_path: Path):
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["heads.bias"][3] = float("nan")
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"heads\.bias is not finite after loading"):
        await engine(broken).start()


async def test_another_sample_rate_stops_the_start(tiny: Path, tmp_path: Path):
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "audio_tokenizer_sample_rate": 24_000}))
    with pytest.raises(ConfigError, match="speaks at 24000 Hz, not 48000"):
        await engine(other).start()


async def test_dummy_weights_need_none(tiny: Path, tmp_path: Path):
    bare = tmp_path / "bare"
    shutil.copytree(tiny, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    stage = PIPELINE.stage("talker")
    options = MossOptions(trust_remote_code=True)
    context = EngineContext(stage, str(bare), MossTTSNano, options, load_format="dummy")
    made = GeneratorEngine(context)
    await made.start()
    assert len((await speak(made, "Hi."))[0])


async def test_more_than_one_at_a_time_is_refused_with_the_reason(tiny: Path):
    config = {"stages": {"talker": {"engine": {"max_num_seqs": 2}}}}
    with pytest.raises(ConfigError, match="share one codec's state; add replicas instead"):
        resolve("moss_tts_nano", AppArgs(model=str(tiny), deploy_config=config))
