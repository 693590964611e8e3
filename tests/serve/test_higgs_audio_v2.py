"""``higgs_audio_v2`` through real Ray Serve over HTTP, on a tiny random checkpoint."""

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from omni_ray.models.higgs_audio_v2.checkpoint import make_tiny
from tests.conftest import Served, Serving, wait_until

TEXT = "The past is just a story we tell ourselves."
ROWS, LAG = 30, 7


@pytest.fixture(scope="module")
def app(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Served:
    tiny: Path = tmp_path_factory.mktemp("served") / "higgs"
    make_tiny(tiny)
    talker = {
        "engine": {"deterministic": True, "threads": 1, "max_model_len": 512},
        "sampling": {"max_tokens": ROWS},
    }
    code2wav = {"engine": {"deterministic": True}}
    return serving("higgs_audio_v2", {"model": str(tiny), "stages": {"talker": talker, "code2wav": code2wav}})


def speech(text: str = TEXT, **more: Any) -> dict[str, Any]:
    """In one piece: random weights do not end by themselves, and a raw stream that is cut off is aborted."""
    return {"model": "higgs_audio_v2", "input": text, "response_format": "pcm", "seed": 5, "stream": False, **more}


def recording(seconds: float = 0.5) -> str:
    buffer = io.BytesIO()
    tone = np.sin(np.arange(int(16_000 * seconds)) * 0.05).astype(np.float32) / 2
    soundfile.write(buffer, tone, 16_000, format="WAV")
    return base64.b64encode(buffer.getvalue()).decode()


async def test_four_at_once_equal_one_alone(app: Served):
    """With and without a recording, in deterministic mode, byte for byte; the lag of the delay pattern is no sound."""
    voice = {"ref_audio": recording(), "ref_text": "Ah."}
    async with app.async_client() as client:

        async def ask(k: int) -> bytes:
            body = speech(TEXT[: 20 + k], seed=k, **(voice if k > 1 else {}))
            response = await client.post("/v1/audio/speech", json=body)
            assert response.status_code == 200, response.text
            assert response.headers["x-sample-rate"] == "24000"
            return response.content

        alone = [await ask(k) for k in range(4)]
        assert await asyncio.gather(*(ask(k) for k in range(4))) == alone
    assert len(set(alone)) == 4
    assert all(len(pcm) == 2 * 960 * (ROWS - LAG) for pcm in alone)


def test_bad_recordings_are_400_and_hanging_up_frees_both_stages(app: Served):
    """C04: the next good request succeeds."""
    with app.client() as client:
        for more, param in (({"ref_audio": recording()}, "ref_text"), ({"ref_audio": recording(0.01)}, "ref_audio")):
            more = more if param == "ref_text" else {**more, "ref_text": "ah"}
            response = client.post("/v1/audio/speech", json=speech(**more))
            assert response.status_code == 400, response.text
            assert response.json()["error"]["param"] == param
        with client.stream("POST", "/v1/audio/speech", json=speech(stream=True)) as streamed:
            next(streamed.iter_raw(100))
        wait_until(lambda: not any(app.ongoing().values()), 20)
        assert client.post("/v1/audio/speech", json=speech("Hi.")).status_code == 200
