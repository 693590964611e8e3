"""A pipeline, a model, extras and a processor from a package of somebody else's: installed, listed, served."""

import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import httpx
import numpy as np
import pytest

from omni_ray.serve.ports import free_port
from tests.conftest import PATIENCE_S, wait_until
from tests.serve.test_cluster_commands import in_background

pytestmark = pytest.mark.alone

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tests" / "tone_tts"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment that sees this one's packages, with the example installed as its users would."""
    home = tmp_path_factory.mktemp("out_of_tree")
    venv.create(home / "venv", with_pip=False)
    mine = home / "venv" / "bin" / "python"
    (site,) = (home / "venv").glob("lib/python*/site-packages")
    (site / "ours.pth").write_text(f"{ROOT}\n{sysconfig.get_paths()['purelib']}\n")
    built = home / "tone_tts"
    subprocess.run(["cp", "-r", PACKAGE, built], check=True)  # a build writes beside its sources
    words = ["--no-deps", "--no-index", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "--python", mine, "install", *words, built], check=True, timeout=240)
    return mine


def environment(**more: str) -> dict[str, str]:
    env = {**os.environ, "RAY_AUTH_MODE": "disabled", **more}
    for name in ("RAY_ADDRESS", "PYTHONPATH"):
        env.pop(name, None)
    return env


def listed(python: Path, **more: str) -> str:
    words = [python, "-m", "omni_ray.cli", "list"]
    return subprocess.run(words, env=environment(**more), capture_output=True, text=True, check=True).stdout


def ready(base: str) -> bool:
    try:
        return httpx.get(f"{base}/ready").status_code == 200
    except httpx.HTTPError:
        return False


def test_listed_where_installed_and_allowed(python: Path):
    assert "tone_tts       talker\n" in listed(python)
    assert "tone_tts" not in listed(python, OMNI_RAY_PLUGINS="another")
    assert "tone_tts" not in listed(Path(sys.executable))


def test_served(python: Path):
    """Its extras are validated strictly, its processor and model run in a stage of their own."""
    port = free_port()
    words = [str(python), "-m", "omni_ray.cli", "serve", "tone_tts", "--port", str(port)]
    with in_background(*words, env=environment()):
        base = f"http://127.0.0.1:{port}"
        wait_until(lambda: ready(base), 180)
        body = {"model": "tone_tts", "input": "Ab, c!", "response_format": "pcm", "tone": {"base_hz": 440}}
        response = httpx.post(f"{base}/v1/audio/speech", json=body, timeout=PATIENCE_S)
        assert response.status_code == 200, response.text
        assert response.headers["x-sample-rate"] == "16000"
        pitches = [440 * 2 ** (i / 12) for i in range(3)]
        sines = [0.3 * np.sin(2 * np.pi * hz / 16_000 * np.arange(1_600)) for hz in pitches]
        heard = np.frombuffer(response.content, "<i2") / 32767
        np.testing.assert_allclose(heard, np.concatenate(sines), atol=1 / 32767)
        wrong = httpx.post(f"{base}/v1/audio/speech", json={**body, "tone": {"base_hz": 3}}, timeout=PATIENCE_S)
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"].startswith("tone")
