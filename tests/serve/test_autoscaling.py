"""A load step on ``ramp`` through real Ray Serve: replicas follow, nobody hears a gap, going down cuts nobody off.

Listeners have players with ``JITTER_S`` in hand, as real ones do: a busy machine delivers a piece a little late.
"""

import asyncio
import time
from collections import defaultdict
from typing import Any

import httpx

from omni_ray.models.ramp import oracle
from omni_ray.playback import Playback
from omni_ray.serve.status import applications
from tests.conftest import Served, Serving, wait_until

JITTER_S = 1.0
"""Twelve listeners to one codec would hear gaps of seconds."""
SCALING = {"max_replicas": 4, "upscale_delay_s": 0.3, "downscale_delay_s": 1, "report_every_s": 0.3}
SCALED = ("talker", "code2wav")
CONFIG: dict[str, Any] = {
    "stages": {
        # 0.75 s of work for a second of a stream's sound, and three places
        "talker": {
            "deployment": {"autoscaling_config": SCALING},
            "engine": {"pace_ms": 60, "threads": 4, "max_num_seqs": 3, "reserved_seqs": 0},
        },
        # 0.15 s of work for each second of sound: more than five streams are too much for one
        "code2wav": {"deployment": {"autoscaling_config": SCALING}, "engine": {"frame_ms": 12, "chunk_frames": [16]}},
    },
    "ingress": {"grace_s": 60},
}


async def listen(client: httpx.AsyncClient, text: str) -> tuple[bytes, Playback]:
    """The whole answer as it comes, and what a player that starts with the first sound hears of it."""
    pcm, playback = b"", Playback()
    body = {"model": "ramp", "input": text, "voice": "a", "response_format": "pcm"}
    async with client.stream("POST", "/v1/audio/speech", json=body) as response:
        assert response.status_code == 200
        async for piece in response.aiter_raw():
            playback.arrived(time.monotonic(), len(piece) / 48_000)
            pcm += piece
    return pcm, playback


def running(app: Served) -> dict[str, int]:
    deployments = applications()[app.name].deployments
    return {stage: deployments[stage].running() for stage in SCALED}


async def test_replicas_follow_a_load_step(serving: Serving) -> None:
    """Twelve listeners within 5 s; the last four listen three times as long, while replicas are taken away again."""
    app = serving("ramp", CONFIG)
    assert running(app) == {"talker": 1, "code2wav": 1}
    texts = [" ".join([f"s{k}", *["w"] * (19 if k < 8 else 59)]) for k in range(12)]
    seen: dict[str, list[int]] = defaultdict(list)
    fewer_while_heard = False
    async with app.async_client(timeout=120) as client:
        listeners = []
        for text in texts:
            listeners.append(asyncio.create_task(listen(client, text)))
            await asyncio.sleep(0.4)
        while not all(listener.done() for listener in listeners):
            for stage, count in (await asyncio.to_thread(running, app)).items():
                seen[stage].append(count)
                fewer_while_heard |= count < max(seen[stage])
            await asyncio.sleep(0.1)
        heard = [listener.result() for listener in listeners]
    assert [pcm for pcm, _ in heard] == [oracle.pcm(text) for text in texts]
    underruns = [playback.underrun_s for _, playback in heard]
    assert max(underruns) < JITTER_S, underruns
    assert max(seen["talker"]) >= 3
    assert max(seen["code2wav"]) >= 2
    assert fewer_while_heard
    await asyncio.to_thread(wait_until, lambda: running(app) == {"talker": 1, "code2wav": 1})
    assert not any((await asyncio.to_thread(app.working)).values())
