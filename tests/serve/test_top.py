"""``omni-ray top --once`` beside live streams on real Serve."""

import asyncio
import re

import pytest

from omni_ray.cli import main
from omni_ray.serve.top import look
from tests.conftest import Serving, wait_until
from tests.serve.test_tracing import CONFIG


async def test_snapshot_beside_two_streams(serving: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    """Chunks of 0.24 s every 0.4 s: one stream runs and loses slack, the other waits in code2wav's queue."""
    app = serving("ramp", CONFIG)
    body = {
        "model": "ramp", "input": " ".join(["w"] * 40), "voice": "a", "response_format": "pcm",
        "ramp": {"code2wav": {"delay_ms": 400}},
    }  # fmt: skip
    async with app.async_client() as client:
        asked = [asyncio.create_task(client.post("/v1/audio/speech", json=body)) for _ in range(2)]

        def one_waits_and_one_is_late() -> bool:
            (view,) = look(app.name)
            (state,) = next(stage for stage in view.stages if stage.name == "code2wav").replicas
            return state.engine.queued == 1 and bool(state.leads) and min(state.leads) < -0.2

        await asyncio.to_thread(wait_until, one_waits_and_one_is_late)
        assert await asyncio.to_thread(main, ["top", app.name, "--once"]) == 0
        shown = capsys.readouterr().out
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    # Ray's daemons say what they notice into the same process
    lines = [line for line in shown.splitlines() if "(raylet)" not in line]
    assert lines[0] == f"{app.name}: RUNNING, 2 requests alive at 1 ingress replica(s)"
    assert [line.split()[0] for line in lines[2:]] == ["thinker", "thinker", "talker", "code2wav"]
    (codec,) = [line for line in lines if line.startswith("code2wav")]
    assert re.search(r" 1/1 +1 +\d+\.\d +2 +-\d+\.\d\d +-\d+\.\d\d ", codec), codec


def test_unknown_application(serving: Serving, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "no-such-app", "--once"]) == 2
    assert "no application 'no-such-app' here" in capsys.readouterr().err
