"""How long a request waits for what a fault took away, and that it never waits for ever. ``ramp``, real Ray Serve."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
import pytest

from omni_ray.models.ramp import oracle
from tests.conftest import SOON, Served, Serving
from tests.serve.test_faults import until
from tests.serve.test_ramp import TEXT, ask_chat, chat, heard, parse_sse

RECOVERY_WAIT_S = 4.5
SILENCE_S = 3.0
WORDS = " ".join(f"w{k}" for k in range(30))


@pytest.fixture
def app(serving: Serving) -> Served:
    """A hung stage is replaced within two seconds."""
    stage = {"engine": {"allow_request_faults": True, "stall_s": 0.6}, "deployment": {"health_check_period_s": 0.3}}
    return serving(
        "ramp",
        {
            "stages": {"thinker": stage, "talker": stage, "code2wav": {"engine": {"chunk_frames": [1, 4]}}},
            "streaming": {"first_chunk_timeout_s": SILENCE_S, "idle_timeout_s": SILENCE_S},
            "ingress": {"recovery_wait_s": RECOVERY_WAIT_S, "max_takeovers": 50, "deployment": SOON},
        },
    )


@pytest.fixture
async def never_up(cluster: str) -> AsyncIterator[str]:
    """The URL of an application whose stages find no node that could hold them."""
    from ray import serve

    from omni_ray.serve.builder import build_application
    from omni_ray.serve.resolve import AppArgs

    nowhere = {"deployment": {"ray_actor_options": {"resources": {"nowhere": 1}}}}
    config = {"stages": dict.fromkeys(("thinker", "talker", "code2wav"), nowhere), "ingress": {"grace_s": 2}}
    application = build_application("ramp", AppArgs(deploy_config=config))
    target = serve.RunTarget(application, name="never_up", route_prefix="/never_up")
    await asyncio.to_thread(serve.run_many, [target], wait_for_applications_running=False)
    yield f"{cluster}/never_up"
    await asyncio.to_thread(serve.delete, "never_up", _blocking=False)


def waiting(url: str) -> list[str]:
    """Stages that an ingress replica waits for, as ``/ready`` tells."""
    with suppress(httpx.HTTPError, ValueError):
        return sorted(httpx.get(f"{url}/ready").json()["waiting"])
    return ["no ingress answers"]


async def test_a_stage_that_was_up_is_waited_for_and_one_that_never_was_is_not(app: Served, never_up: str) -> None:
    """A new ingress replica without its thinker answered 503 after 3 s, though the thinker was soon back (chaos run).

    It learns from the other stages that the application was ready. Who leaves while waiting leaves nothing behind.
    """
    async with app.async_client() as client:
        assert await ask_chat(client, TEXT) == (oracle.pcm(TEXT), TEXT)
        await until(lambda: waiting(app.url) == [])
        (thinker,), ingress = app.pids("thinker"), app.pids("ingress")
        os.kill(thinker, signal.SIGSTOP)
        try:
            os.kill(ingress[0], signal.SIGKILL)
            await until(lambda: waiting(app.url) == ["thinker"])
            await until(lambda: waiting(never_up) == ["code2wav", "talker", "thinker"])
            started = time.monotonic()
            first = asyncio.create_task(client.post("/v1/chat/completions", json=chat(TEXT)))
            starting = asyncio.create_task(client.post(f"{never_up}/v1/chat/completions", json=chat(TEXT)))
            leaves = asyncio.create_task(client.post("/v1/chat/completions", json=chat(TEXT)))
            told = await starting
            assert (told.status_code, told.headers["retry-after"]) == (503, "5")
            assert told.json()["error"]["message"] == "starting: waiting for thinker, talker, code2wav"
            leaves.cancel()
            gave_up = await first
            assert time.monotonic() - started >= RECOVERY_WAIT_S
            assert (gave_up.status_code, gave_up.headers["retry-after"]) == (503, "5")
            assert gave_up.json()["error"]["message"] == "waiting for thinker"
            patient = [asyncio.create_task(ask_chat(client, f"{TEXT} {k}")) for k in range(3)]
        finally:
            os.kill(thinker, signal.SIGCONT)
        assert await asyncio.gather(*patient) == [(oracle.pcm(f"{TEXT} {k}"), f"{TEXT} {k}") for k in range(3)]
    await until(lambda: not any(app.ongoing().values()))


async def test_a_request_that_hangs_whatever_computes_it_ends(app: Served) -> None:
    """Its talker hangs and is replaced, again and again, and no attempt is silent for too long: all together are.

    Two of them, so that none is alone on a replica that dies.
    """
    fault: dict[str, Any] = {"talker": {"hang_at": 60}}
    started = time.monotonic()
    async with app.async_client() as client:
        asked = [client.post("/v1/chat/completions", json=chat(f"{WORDS} {k}", ramp=fault)) for k in range(2)]
        answers = await asyncio.gather(*asked)
        took = time.monotonic() - started
        assert SILENCE_S < took < 3 * (SILENCE_S + RECOVERY_WAIT_S)
        for k, answer in enumerate(answers):
            *said, last = parse_sse(answer.text)
            assert last["error"]["code"] in (503, 504)
            pcm, text = heard(said)
            assert pcm
            assert oracle.pcm(f"{WORDS} {k}").startswith(pcm)
            assert text == f"{WORDS} {k}"
        await until(lambda: waiting(app.url) == [])
        assert await ask_chat(client, TEXT) == (oracle.pcm(TEXT), TEXT)
