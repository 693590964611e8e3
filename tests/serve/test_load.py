"""More work than there is room for, through real Ray Serve: who waits, who is refused, and that nobody else is hurt."""

import asyncio
import base64
import json
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from omni_ray.models.ramp import oracle
from tests.conftest import Serving, wait_until
from tests.serve.test_ramp import chat, speech

KEYS = {"alice": "sk-alice", "bob": "sk-bob"}
LONG = " ".join(["word"] * 60)
TRIES = 3
"""What is compared was measured at two moments, and something else may have had the CPU in one of them."""

FLOOD: dict[str, Any] = {
    "stages": {
        "thinker": {"engine": {"faults": {"delay_ms": 10}}},
        "talker": {"engine": {"max_num_seqs": 16, "faults": {"delay_ms": 8}}},
        "code2wav": {"engine": {"max_num_seqs": 32, "frame_ms": 1, "step_ms": 30}},
    },
}
"""The codec decodes 1,000 frames a second; the 14 talkers that a flood may have make up to 1,750."""


def keyed(config: dict[str, Any]) -> dict[str, Any]:
    """With API keys. Replicas inherit the environment of the cluster, so the keys reach them by their own."""
    keys = ",".join(f"{name}:{key}" for name, key in KEYS.items())
    options = {"runtime_env": {"env_vars": {"OMNI_RAY_TEST_KEYS": keys}}}
    ingress = {"api_keys_env": "OMNI_RAY_TEST_KEYS", "deployment": {"ray_actor_options": options}}
    return {**config, "ingress": {**ingress, **config.get("ingress", {})}}


def bearer(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


async def first_sound_s(client: httpx.AsyncClient, **more: Any) -> float:
    """Seconds until a chat speaks; its whole answer must be the oracle's."""
    started, first, pcm = time.monotonic(), None, b""
    async with client.stream("POST", "/v1/chat/completions", json=chat(**more), headers=bearer("bob")) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    if data := (choice["delta"].get("audio") or {}).get("data"):
                        first = first or time.monotonic() - started
                        pcm += base64.b64decode(data)
    assert pcm == oracle.pcm("one two three four")
    assert first is not None
    return first


@asynccontextmanager
async def flood(client: httpx.AsyncClient, streams: int, body: dict[str, Any], name: str) -> AsyncIterator[list[float]]:
    """``streams`` clients that ask again and again; every answer is exact. Yields when answers came."""
    answered: list[float] = []
    expected = oracle.pcm(body["input"])

    async def one() -> None:
        while True:
            response = await client.post("/v1/audio/speech", json=body, headers=bearer(name))
            assert response.status_code in (200, 503, 429), response.text
            if response.status_code == 200:
                assert response.content == expected
                answered.append(time.monotonic())
            else:
                await asyncio.sleep(float(response.headers["retry-after"]))

    tasks = [asyncio.create_task(one()) for _ in range(streams)]
    try:
        yield answered
    finally:
        for task in tasks:
            task.cancel()
        for outcome in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(outcome, asyncio.CancelledError), outcome


async def test_a_flood_of_batch_speech_does_not_delay_chat(serving: Serving) -> None:
    """With every place that a flood may take taken, chat speaks within twice the time it needs alone."""
    app = serving("ramp", keyed(FLOOD))

    def full() -> bool:
        """The flood has every place in the codec that it may have; between two of its requests one is empty."""
        codec = app.states("code2wav")[0].engine
        return (codec.running, codec.queued) == (28, 2)

    ratios: list[float] = []
    async with app.async_client() as client:
        await first_sound_s(client)
        while not ratios or (min(ratios) >= 2 and len(ratios) < TRIES):
            alone = [await first_sound_s(client) for _ in range(9)]
            async with flood(client, 30, speech(LONG, stream=False, stream_format="audio"), "alice"):
                await asyncio.to_thread(wait_until, full)
                crowded = [await first_sound_s(client) for _ in range(9)]
                await asyncio.to_thread(wait_until, full)
            ratios.append(statistics.median(crowded) / statistics.median(alone))
    assert min(ratios) < 2, ratios
    wait_until(lambda: not any(app.ongoing().values()))


async def test_a_key_that_floods_leaves_others_their_share(serving: Serving) -> None:
    """Two keys, the same work, one with ten times as many clients: the other gets what it asks for, up to a half."""
    app = serving("ramp", keyed(FLOOD))
    body = speech(LONG)

    async def answers(client: httpx.AsyncClient, seconds: float) -> int:
        async with flood(client, 2, body, "bob") as answered:
            await asyncio.sleep(seconds)
            return len(answered)

    shares: list[float] = []  # 1 also if each client gets 1.7 times what each of the other key gets
    async with app.async_client() as client:
        while not shares or (max(shares) < 0.6 and len(shares) < TRIES):
            alone = await answers(client, 5)
            async with flood(client, 20, body, "alice") as hers:
                await asyncio.to_thread(wait_until, lambda hers=hers: len(hers) > 0)
                before = len(hers)
                crowded = await answers(client, 5)
                flooded = len(hers) - before
            shares.append(1 if crowded / 2 > 1.7 * flooded / 20 else crowded / alone)
    assert max(shares) >= 0.6, shares
    assert flooded > crowded / 2
    wait_until(lambda: not any(app.ongoing().values()))
