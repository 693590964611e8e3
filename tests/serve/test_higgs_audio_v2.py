"""``higgs_audio_v2`` through real Ray Serve over HTTP, on a tiny random checkpoint."""

from functools import partial

import pytest

from omni_ray.models.higgs_audio_v2.checkpoint import make_tiny
from tests.conftest import Served, Serving, wait_until
from tests.serve import voices
from tests.serve.voices import TEXT, deterministic_app, recording, same_alone_and_at_once

ROWS, LAG = 30, 7
speech = partial(voices.speech, "higgs_audio_v2")


@pytest.fixture(scope="module")
def app(serving: Serving, tmp_path_factory: pytest.TempPathFactory) -> Served:
    return deterministic_app(serving, "higgs_audio_v2", make_tiny, tmp_path_factory.mktemp("served") / "higgs", ROWS)


async def test_four_at_once_equal_one_alone(app: Served):
    """With and without a recording, in deterministic mode, byte for byte; the lag of the delay pattern is no sound."""
    voice = {"ref_audio": recording(), "ref_text": "Ah."}
    bodies = [speech(TEXT[: 20 + k], seed=k, **(voice if k > 1 else {})) for k in range(4)]
    alone = await same_alone_and_at_once(app, bodies, {"x-sample-rate": "24000"})
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
