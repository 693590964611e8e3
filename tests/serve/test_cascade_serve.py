"""A cascade through real Ray Serve: ``ramp``'s thinker, and CSM's talker and code2wav on a tiny random checkpoint."""

import base64
from pathlib import Path

import pytest

from omni_ray.models.csm.checkpoint import make_tiny
from tests.conftest import Served, Serving


@pytest.fixture(scope="module")
def app(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Served:
    tiny: Path = tmp_path_factory.mktemp("cascade") / "csm"
    make_tiny(tiny)
    engine = {"deterministic": True, "threads": 1, "max_model_len": 512}
    stages = {
        "talker": {"model": str(tiny), "engine": engine, "sampling": {"max_tokens": 25}},
        "code2wav": {"model": str(tiny), "engine": {"deterministic": True}},
    }
    return serving("cascade", {"variant": {"thinker": "ramp", "talker": "csm"}, "stages": stages})


def test_a_chat_is_answered_and_its_text_is_spoken(app: Served):
    """The sound is what the speech endpoint makes of the same text with the same seed, byte for byte."""
    with app.client() as client:
        body = {
            "model": "cascade",
            "messages": [{"role": "user", "content": "hello there"}],
            "modalities": ["text", "audio"],
            "audio": {"format": "pcm16", "voice": "3"},
            "seed": 7,
        }
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        audio = answer.json()["choices"][0]["message"]["audio"]
        assert audio["transcript"].strip()
        speech = {"model": "cascade", "input": audio["transcript"].strip(), "voice": "3", "seed": 7, "stream": False}
        spoken = client.post("/v1/audio/speech", json={**speech, "response_format": "pcm"})
        assert spoken.status_code == 200, spoken.text
        assert base64.b64decode(audio["data"]) == spoken.content
        assert len(spoken.content) == 2 * 1920 * 25
        text = client.post("/v1/chat/completions", json={**body, "modalities": ["text"], "audio": None})
        assert text.json()["choices"][0]["message"]["content"] == audio["transcript"]
