"""``voxcpm2`` by its own package, on a tiny random checkpoint: its generator as it is, also through real Ray Serve."""

import asyncio
import base64
import io
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from numpy.typing import NDArray

from omni_ray.engine.base import EngineContext
from omni_ray.engine.generator import GeneratorEngine
from omni_ray.engine.types import AudioChunk, Finish, Request
from omni_ray.errors import ConfigError
from omni_ray.models.voxcpm2.model import VoxCPM2
from omni_ray.models.voxcpm2.options import VoxOptions
from omni_ray.models.voxcpm2.pipeline import PIPELINE
from omni_ray.serve.resolve import AppArgs, resolve
from tests.conftest import Serving, wait_until

PATCH = 3840
"""Samples of two latents of 1920; the published model has four in a patch."""
TEXT = "Hello."
STEPS = 3


def engine(model: Path) -> GeneratorEngine:
    options = VoxOptions(inference_timesteps=STEPS)
    return GeneratorEngine(EngineContext(PIPELINE.stage("talker"), str(model), VoxCPM2, options))


async def speak(made: GeneratorEngine, text: str, **fields: Any) -> tuple[NDArray[np.float32], int]:
    async def inputs() -> AsyncIterator[str]:
        yield text

    request = Request("r", **{"seed": 0, "sampling": PIPELINE.stage("talker").sampling, **fields})
    async with aclosing(made.generate(request, {"request": inputs()})) as outputs:
        *chunks, last = [output async for output in outputs]
    assert isinstance(last, Finish)
    assert all(isinstance(c, AudioChunk) and c.sample_rate == 48_000 for c in chunks)
    return np.concatenate([c.samples for c in chunks]), len(chunks)


async def test_streams_equal_upstreams_generator_and_its_one_call(tiny: Path):
    """Streams that take turns on the one model are each as alone; upstream's whole answer is within its rounding."""
    from voxcpm.model.voxcpm2 import VoxCPM2Model

    upstream: Any = VoxCPM2Model.from_local(str(tiny), optimize=False, device="cpu")
    made = engine(tiny)
    await made.start()
    spoken = await asyncio.gather(*(speak(made, TEXT, seed=seed) for seed in (0, 7)))
    for seed, (samples, chunks) in zip((0, 7), spoken, strict=True):
        torch.manual_seed(seed)
        theirs = torch.cat(list(upstream.generate_streaming(TEXT, min_len=0, inference_timesteps=STEPS)), -1)[0].numpy()
        np.testing.assert_array_equal(samples, theirs)
        torch.manual_seed(seed)
        whole = upstream.generate(TEXT, min_len=0, inference_timesteps=STEPS)[0].numpy()
        assert np.sqrt((whole**2).mean()) > 0.01
        assert np.abs(samples - whole).max() <= 1e-5 * np.abs(whole).max()
        assert chunks == len(whole) / PATCH == len(TEXT) * 6 + 10
    assert not np.array_equal(spoken[0][0], spoken[1][0])
    cut = (await speak(made, TEXT, max_audio_seconds=0.25))[0]
    np.testing.assert_array_equal(cut, spoken[0][0][:12_000])
    await made.stop()


async def test_a_missing_tensor_stops_the_start(tiny: Path, tmp_path: Path):
    """Upstream loads with ``strict=False`` and leaves it random."""
    from safetensors.torch import load_file, save_file

    broken = tmp_path / "broken"
    shutil.copytree(tiny, broken)
    tensors = load_file(broken / "audiovae.safetensors")
    del tensors["decoder.model.0.bias"]
    save_file(tensors, broken / "audiovae.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"1 tensors are missing: audio_vae\.decoder\.model\.0\.bias"):
        await engine(broken).start()


async def test_without_the_package_the_start_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "voxcpm", None)
    monkeypatch.setitem(sys.modules, "voxcpm.model.voxcpm2", None)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConfigError, match=r"voxcpm cannot be imported .*runtime_env: \{pip: \[voxcpm"):
        await engine(tmp_path).start()


def test_more_than_one_at_a_time_is_refused_with_the_reason(tmp_path: Path):
    config = {"stages": {"talker": {"engine": {"max_num_seqs": 2}}}}
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="codec's state lie on the model; add replicas"):
        resolve("voxcpm2", AppArgs(model=str(tmp_path), deploy_config=config))


def recording() -> str:
    buffer = io.BytesIO()
    tone = np.sin(np.arange(12_000) * 0.05).astype(np.float32) / 2
    soundfile.write(buffer, tone, 24_000, format="WAV")
    return base64.b64encode(buffer.getvalue()).decode()


async def test_it_is_served_in_a_runtime_environment_of_its_own(voxcpm_path: str, tiny: Path, serving: Serving):
    """The stage's replicas alone can import the package. Voices, seeds, a cancelled stream, and the next request."""
    alone = {"env_vars": {"PYTHONPATH": voxcpm_path}}
    deployment = {"ray_actor_options": {"num_cpus": 1, "runtime_env": alone}}
    talker = {"deployment": deployment, "engine": {"inference_timesteps": STEPS}}
    app = serving("voxcpm2", {"model": str(tiny), "stages": {"talker": talker}})
    body = {"model": "voxcpm2", "input": TEXT, "response_format": "pcm", "seed": 5}
    voices: tuple[dict[str, Any], ...] = ({}, {"ref_audio": recording()}, {"ref_audio": recording(), "ref_text": "ah"})
    async with app.async_client(200) as client:

        async def ask(more: dict[str, Any]) -> bytes:
            response = await client.post("/v1/audio/speech", json={**body, **more})
            assert response.status_code == 200, response.text
            assert response.headers["x-sample-rate"] == "48000"
            return response.content

        one = [await ask(more) for more in voices]
        assert await asyncio.gather(*(ask(more) for more in voices)) == one
        assert len(set(one)) == 3
        assert {len(pcm) for pcm in one} == {2 * PATCH * (len(TEXT) * 6 + 10)}
        assert await ask({"seed": 6}) != one[0]
        async with client.stream("POST", "/v1/audio/speech", json={**body, "input": TEXT * 9}) as response:
            async for _ in response.aiter_raw(100):
                break
        await asyncio.to_thread(wait_until, lambda: not any(app.ongoing().values()), 20)
        assert await ask({}) == one[0]
