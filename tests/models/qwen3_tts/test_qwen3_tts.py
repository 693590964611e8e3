"""``qwen3_tts`` by its own package and its own transformers, through real Ray Serve, on a tiny random checkpoint.

Opt-in: ``OMNI_RAY_TEST_QWEN_TTS`` is a path (several directories, as in PYTHONPATH) with qwen-tts 0.1.1, transformers
4.57.3, huggingface_hub < 1, tokenizers 0.22, accelerate 1.12, sox, and what ``tests/models/voxcpm2/conftest.py`` lists.
"""

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omni_ray.audio import pcm16
from omni_ray.engine.base import EngineContext
from omni_ray.engine.generator import GeneratorEngine
from omni_ray.errors import ConfigError
from omni_ray.models.qwen3_tts.model import Qwen3TTS
from omni_ray.models.qwen3_tts.options import QwenTTSOptions
from omni_ray.models.qwen3_tts.pipeline import TALKER, resolve
from tests.conftest import Serving

ROOT = Path(__file__).parents[3]
FRAMES = 14
UPSTREAM = """
import sys, numpy, torch
from pathlib import Path
from omni_ray.models.qwen3_tts.checkpoint import make_tiny
tiny, out = Path(sys.argv[1]), Path(sys.argv[2])
make_tiny(tiny)
from qwen_tts import Qwen3TTSModel
model = Qwen3TTSModel.from_pretrained(str(tiny), device_map="cpu", dtype=torch.float32)
for number, (speaker, seed) in enumerate((("vivian", 5), ("ryan", 6))):
    torch.manual_seed(seed)
    sounds, rate = model.generate_custom_voice(
        "Hello there.", speaker=speaker, language="Auto", non_streaming_mode=True, max_new_tokens=14,
        do_sample=True, subtalker_dosample=True, temperature=0.9, top_k=50, top_p=1.0, repetition_penalty=1.05)
    assert rate == 24000
    numpy.save(out / f"{number}.npy", sounds[0])
"""


@pytest.fixture(scope="module")
def package() -> str:
    path = os.environ.get("OMNI_RAY_TEST_QWEN_TTS")
    if not path:
        pytest.skip("needs the package qwen-tts; OMNI_RAY_TEST_QWEN_TTS names no directories that hold it")
    return path


async def test_it_is_served_with_another_transformers_than_ours(package: str, serving: Serving, tmp_path: Path):
    """Equal to upstream's own call, run in a process of its own; the next request follows; bad ones are 400."""
    tiny, alone = tmp_path / "tiny", f"{package}{os.pathsep}{ROOT}"
    made = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", UPSTREAM, str(tiny), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": alone, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=250,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-2000:]
    deployment = {"ray_actor_options": {"num_cpus": 1, "runtime_env": {"env_vars": {"PYTHONPATH": alone}}}}
    talker = {"deployment": deployment, "sampling": {"max_tokens": FRAMES}}
    app = serving("qwen3_tts", {"model": str(tiny), "stages": {"talker": talker}})
    body = {"model": "qwen3_tts", "input": "Hello there.", "response_format": "pcm", "stream": False}
    asked: list[dict[str, Any]] = [
        {"voice": "vivian", "seed": 5}, {"voice": "ryan", "seed": 6}, {"voice": "alloy", "seed": 5},
    ]  # fmt: skip
    async with app.async_client(200) as client:
        answers = await asyncio.gather(*(client.post("/v1/audio/speech", json={**body, **more}) for more in asked))
        for number, response in enumerate(answers):
            assert response.status_code == 200, response.text
            assert response.headers["x-sample-rate"] == "24000"
            theirs = np.load(tmp_path / f"{number % 2}.npy")
            assert np.sqrt((theirs**2).mean()) > 0.01
            assert response.content == pcm16(theirs)[0]
        assert (await client.post("/v1/audio/speech", json={**body, "voice": "nobody"})).status_code == 400


async def test_without_the_package_the_start_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "qwen_tts", None)
    made = GeneratorEngine(EngineContext(TALKER, str(tmp_path), Qwen3TTS, QwenTTSOptions()))
    with pytest.raises(ConfigError, match=r"qwen-tts cannot be imported .*runtime_env: \{pip: \[qwen-tts"):
        await made.start()


def test_voices_are_the_checkpoints():
    config = {"talker_config": {"spk_id": {"ono_anna": 1, "alloy": 2}}}
    voices = resolve(config).voices
    assert (voices.names, voices.default) == (("ono_anna", "alloy"), "ono_anna")
    assert voices.aliases["nova"] == "ono_anna"
    assert "alloy" not in voices.aliases
    assert resolve({}).voices.default == "vivian"
