"""``csm`` through real Ray Serve over HTTP, on a tiny random checkpoint."""

import base64
from functools import partial
from typing import Any

import pytest

from omni_ray.models.csm.checkpoint import make_tiny
from tests.conftest import Served, Serving, wait_until
from tests.serve import voices
from tests.serve.voices import TEXT, deterministic_app, recording, same_alone_and_at_once

FRAMES = 30
speech = partial(voices.speech, "csm")


@pytest.fixture(scope="module")
def app(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Served:
    """In one process, which starts sooner; ``test_cascade_serve`` has its stages in two."""
    out, together = tmp_path_factory.mktemp("served") / "csm", ["talker", "code2wav"]
    return deterministic_app(serving, "csm", make_tiny, out, FRAMES, colocate=together)


async def test_four_at_once_equal_one_alone(app: Served):
    """With and without a recording, in deterministic mode, byte for byte."""
    voice = {"ref_audio": recording(), "ref_text": "Ah."}
    bodies = [speech(TEXT[: 20 + k], seed=k, voice="03"[k % 2], **(voice if k > 1 else {})) for k in range(4)]
    alone = await same_alone_and_at_once(app, bodies, {"x-sample-rate": "24000", "x-omni-ray-truncated": "true"})
    assert all(len(pcm) == 2 * 1920 * FRAMES for pcm in alone)


BAD: list[tuple[dict[str, Any], str | None]] = [
    ({"ref_audio": recording()}, "ref_text"),
    ({"ref_text": "ah"}, "ref_audio"),
    ({"ref_audio": base64.b64encode(b"no audio").decode(), "ref_text": "ah"}, "ref_audio"),
    ({"input": "x" * 600}, None),
]


def test_what_cannot_be_spoken_is_400_naming_the_field(app: Served):
    """C04: the next good request succeeds."""
    with app.client() as client:
        for more, param in BAD:
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
