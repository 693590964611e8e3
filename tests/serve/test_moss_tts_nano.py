"""``moss_tts_nano`` through real Ray Serve over HTTP, on our own tiny remote-code checkpoint."""

import base64
from pathlib import Path
from typing import Any

import pytest

from omni_ray.models.moss_tts_nano.checkpoint import make_tiny
from tests.conftest import Served, Serving, wait_until
from tests.serve.voices import recording, same_alone_and_at_once

TEXT = "A text of some words, long enough for several chunks."


@pytest.fixture(scope="module")
def app(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Served:
    tiny: Path = tmp_path_factory.mktemp("served") / "moss"
    make_tiny(tiny)
    engine = {"trust_remote_code": True, "stall_s": 5}
    return serving("moss_tts_nano", {"model": str(tiny), "stages": {"talker": {"engine": engine}}})


def speech(text: str = TEXT, **more: Any) -> dict[str, Any]:
    return {"model": "moss_tts_nano", "input": text, "response_format": "pcm", "seed": 5, **more}


async def test_eight_at_once_equal_one_alone(app: Served):
    """One generator at a time; the others wait in the engine's queue, and nobody hears another's randomness."""
    bodies = [speech(f"{TEXT} {k}", seed=k % 3) for k in range(8)]
    alone = await same_alone_and_at_once(app, bodies, {"x-sample-rate": "48000"})
    assert all(len(pcm) == 2 * 3840 * ((len(TEXT) + 2) // 2 + 1) for pcm in alone)


async def test_a_reference_voice_is_heard(app: Served):
    async with app.async_client() as client:
        answers = set()
        for more in ({}, {"ref_audio": recording()}, {"ref_audio": recording(), "ref_text": "ah"}):
            response = await client.post("/v1/audio/speech", json=speech(**more))
            assert response.status_code == 200, response.text
            answers.add(response.content)
        assert len(answers) == 3


BAD: list[tuple[dict[str, Any], str]] = [
    ({"ref_text": "ah"}, "ref_audio"),
    ({"ref_audio": "!!"}, "ref_audio"),
    ({"ref_audio": base64.b64encode(b"no audio").decode()}, "ref_audio"),
    ({"ref_audio": recording(31)}, "ref_audio"),
    ({"ref_audio": 7}, "ref_audio"),
    ({"ref_audio": ""}, "ref_audio"),
    ({"ref_audio": recording(), "ref_text": "x" * 2001}, "ref_text"),
]


def test_bad_references_are_400_naming_the_field(app: Served):
    """C04: the next good request succeeds."""
    with app.client() as client:
        for more, param in BAD:
            response = client.post("/v1/audio/speech", json=speech(**more))
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
            assert client.post("/v1/audio/speech", json=speech("Hi.")).status_code == 200


def test_hanging_up_closes_the_generator(app: Served):
    before = app.replicas()
    with app.client() as client:
        for _ in range(5):
            with client.stream("POST", "/v1/audio/speech", json=speech(TEXT * 20)) as response:
                next(response.iter_raw(100))
        wait_until(lambda: not any(app.ongoing().values()), 20)
        assert client.post("/v1/audio/speech", json=speech("Hi.")).status_code == 200
    assert app.replicas() == before
