"""``csm`` through real Ray Serve over HTTP, on a tiny random checkpoint."""

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from omni_ray.models.csm.checkpoint import make_tiny
from tests.conftest import Served, Serving, wait_until

TEXT = "The past is just a story we tell ourselves."
FRAMES = 30


@pytest.fixture(scope="module")
def app(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Served:
    tiny: Path = tmp_path_factory.mktemp("served") / "csm"
    make_tiny(tiny)
    talker = {
        "engine": {"deterministic": True, "threads": 1, "max_model_len": 512},
        "sampling": {"max_tokens": FRAMES},
    }
    code2wav = {"engine": {"deterministic": True}}
    return serving("csm", {"model": str(tiny), "stages": {"talker": talker, "code2wav": code2wav}})


def speech(text: str = TEXT, **more: Any) -> dict[str, Any]:
    """In one piece: random weights do not end by themselves, and a raw stream that is cut off is aborted."""
    return {"model": "csm", "input": text, "response_format": "pcm", "seed": 5, "stream": False, **more}


def recording(seconds: float = 0.5) -> str:
    buffer = io.BytesIO()
    tone = np.sin(np.arange(int(16_000 * seconds)) * 0.05).astype(np.float32) / 2
    soundfile.write(buffer, tone, 16_000, format="WAV")
    return base64.b64encode(buffer.getvalue()).decode()


async def test_four_at_once_equal_one_alone(app: Served):
    """With and without a recording, in deterministic mode, byte for byte."""
    voice = {"ref_audio": recording(), "ref_text": "Ah."}
    async with app.async_client() as client:

        async def ask(k: int) -> bytes:
            body = speech(TEXT[: 20 + k], seed=k, voice="03"[k % 2], **(voice if k > 1 else {}))
            response = await client.post("/v1/audio/speech", json=body)
            assert response.status_code == 200, response.text
            assert response.headers["x-sample-rate"] == "24000"
            assert response.headers["x-omni-ray-truncated"] == "true"
            return response.content

        alone = [await ask(k) for k in range(4)]
        assert await asyncio.gather(*(ask(k) for k in range(4))) == alone
    assert len(set(alone)) == 4
    assert all(len(pcm) == 2 * 1920 * FRAMES for pcm in alone)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"ref_audio": recording()}, "ref_text"),
        ({"ref_text": "ah"}, "ref_audio"),
        ({"ref_audio": base64.b64encode(b"no audio").decode(), "ref_text": "ah"}, "ref_audio"),
        ({"input": "x" * 600}, None),
    ],
)
def test_what_cannot_be_spoken_is_400_naming_the_field(app: Served, more: dict[str, Any], param: str | None):
    """C04: the next good request succeeds."""
    with app.client() as client:
        response = client.post("/v1/audio/speech", json={**speech(), **more})
        assert response.status_code == 400, response.text
        assert param is None or response.json()["error"]["param"] == param
        assert client.post("/v1/audio/speech", json=speech("Hi.")).status_code == 200


def test_hanging_up_frees_both_stages(app: Served):
    with app.client() as client:
        for _ in range(3):
            with client.stream("POST", "/v1/audio/speech", json=speech(stream=True)) as response:
                next(response.iter_raw(100))
        wait_until(lambda: not any(app.ongoing().values()), 20)
        assert client.post("/v1/audio/speech", json=speech("Hi.")).status_code == 200
