"""A stage is upgraded under sixteen live streams, well and badly, by script: ``ramp``, real Ray Serve.

With ``max_surge_percent`` a new replica answers before an old one is stopped; Serve's default stops the old one first.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from omni_ray.models.ramp import oracle
from omni_ray.serve.status import applications
from tests.conftest import Served, Serving, wait_until

STREAMS = 16
TEXT = "one two three"


def config(**talker: Any) -> dict[str, Any]:
    """Sound at 4/3 of real time; one replica of everything, nothing may be taken over or tried again."""
    deployment = {"max_surge_percent": 100, "max_constructor_retry_count": 1, "health_check_period_s": 1}
    engine = {"pace_ms": 60, "threads": STREAMS + 2, **talker}
    return {
        "stages": {
            "thinker": {"deployment": deployment},
            "talker": {"deployment": deployment, "engine": engine},
            "code2wav": {"deployment": deployment, "engine": {"chunk_frames": [4]}},
        },
        "ingress": {"deployment": deployment, "grace_s": 60, "takeover": False, "retry": False},
    }


async def speak(client: httpx.AsyncClient, text: str) -> bytes:
    body = {"model": "ramp", "input": text, "voice": "a", "response_format": "pcm"}
    response = await client.post("/v1/audio/speech", json=body)
    assert response.status_code == 200, response.text
    return response.content


@asynccontextmanager
async def listeners(app: Served, client: httpx.AsyncClient, words: int, frames_per_token: int) -> AsyncIterator[None]:
    """Sixteen live streams while the body runs; every byte of each is of the version that it began with."""
    texts = [" ".join([f"l{k}", *["w"] * (words - 1)]) for k in range(STREAMS)]
    running = [asyncio.create_task(speak(client, text)) for text in texts]
    await asyncio.to_thread(wait_until, lambda: app.states("code2wav")[0].engine.running == STREAMS)
    yield
    answers = await asyncio.gather(*running)
    assert answers == [oracle.pcm(text, frames_per_token=frames_per_token) for text in texts]


async def passers_by(client: httpx.AsyncClient, versions: set[int], until: asyncio.Task[None]) -> list[int]:
    """Short requests, one after the other, until ``until`` is done; the version that served each."""
    known = {oracle.pcm(TEXT, frames_per_token=version): version for version in versions}
    served = []
    while not until.done():
        served.append(known[await speak(client, TEXT)])
    return served


async def deploy(app: Served, talker: dict[str, Any]) -> None:
    from ray import serve

    from omni_ray.serve.builder import build_application
    from omni_ray.serve.resolve import AppArgs

    built = build_application("ramp", AppArgs(deploy_config=config(**talker)))
    await asyncio.to_thread(serve.run, built, name=app.name, route_prefix=httpx.URL(app.url).path)


async def test_upgrades_under_live_streams(serving: Serving) -> None:
    """Versions tell themselves by their frames per token: 3, then 4; then one that would say 5 does not load."""
    app = serving("ramp", config())
    async with app.async_client(timeout=120) as client:
        async with listeners(app, client, words=50, frames_per_token=3):
            rolling = asyncio.create_task(deploy(app, {"frames_per_token": 4}))
            served = await passers_by(client, {3, 4}, rolling)
            await rolling
            assert await speak(client, TEXT) == oracle.pcm(TEXT, frames_per_token=4)
        assert 3 in served, "a stage was away while its replica was replaced"
        talker = app.settled("talker", 1)
        async with listeners(app, client, words=28, frames_per_token=4):
            failing = asyncio.create_task(deploy(app, {"frames_per_token": 5, "loads": False}))
            served = await passers_by(client, {4}, failing)
            (said,) = await asyncio.gather(failing, return_exceptions=True)
            assert isinstance(said, RuntimeError)
            status = applications()[app.name]
            assert status.status == "DEPLOY_FAILED"
            assert "the talker's weights do not load" in status.deployments["talker"].message
        assert set(served) == {4}
        assert app.settled("talker", 1) == talker
        assert (await client.get("/ready")).status_code == 200
        assert await speak(client, TEXT) == oracle.pcm(TEXT, frames_per_token=4)
