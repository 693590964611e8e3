"""Changes under live streams: they finish where they run, new ones go to what is new. ``ramp``, real Ray Serve."""

import asyncio
import os
import signal
from dataclasses import replace
from typing import Any

import httpx

from omni_ray.config.pipeline import PipelineConfig
from omni_ray.models.ramp import oracle
from tests.conftest import Serving, wait_until
from tests.serve.crowd import CHAT, Hearing
from tests.serve.test_ramp import TEXT, ask_chat, chat, heard, parse_sse, speech

WORDS = " ".join(f"w{k}" for k in range(60))
SLOW = {"thinker": {"delay_ms": 70}}


FIXED = {"takeover": False, "retry": False}


def config(talkers: int = 1, thinkers: int = 1, width: int = 60_000, **ingress: Any) -> dict[str, Any]:
    """Latents of 240 kB: they cross as object refs; narrow ones do not, and no thinker stays for them."""
    engine = {"allow_request_faults": True}
    stages: dict[str, Any] = {name: {"engine": engine} for name in ("thinker", "talker", "code2wav")}
    stages["thinker"] = {"engine": {**engine, "latent_width": width}, "deployment": {"num_replicas": thinkers}}
    stages["talker"]["deployment"] = {"num_replicas": talkers}
    return {"stages": stages, "ingress": {"grace_s": 60, **ingress}}


def change(app_name: str, route: str, deploy: dict[str, Any]) -> None:
    from ray import serve

    from omni_ray.serve.builder import build_application
    from omni_ray.serve.resolve import AppArgs

    serve.run(build_application("ramp", AppArgs(deploy_config=deploy)), name=app_name, route_prefix=route)


async def test_scaling_down_cuts_nobody(serving: Serving) -> None:
    """C70: from three talkers to one; every stream finishes where it runs, for nothing may be taken over here.

    A redeploy replaces every stage, and new requests go to what is new.
    """
    app = serving("ramp", config(talkers=3, **FIXED))
    texts = [f"{WORDS} {k}" for k in range(9)]
    slow = {"thinker": {"delay_ms": 120}}  # seven seconds: longer than the roll-out
    before = app.replicas()
    async with app.async_client(timeout=120) as client:
        running = [asyncio.create_task(ask_chat(client, text, ramp=slow)) for text in texts]
        await asyncio.to_thread(wait_until, lambda: all(s.ongoing for s in app.states("talker")))
        await asyncio.to_thread(wait_until, lambda: app.states("code2wav")[0].ongoing == len(texts))
        await asyncio.to_thread(change, app.name, httpx.URL(app.url).path, config(talkers=1, **FIXED))
        assert await ask_chat(client, TEXT) == (oracle.pcm(TEXT), TEXT)
        assert await asyncio.gather(*running) == [(oracle.pcm(text), text) for text in texts]
    assert not set(before["talker"]) & app.settled("talker", 1)
    after = app.replicas()
    assert all(not set(before[stage]) & set(after[stage]) for stage in before), "every stage was to be replaced"


async def test_a_leaving_stage_stays_until_its_latents_were_read(serving: Serving) -> None:
    """A latent dies with the process that owns it: a thinker that has said all leaves after its slow talker has read.

    Nothing may be taken over here, which would hide a loss.
    """
    app = serving("ramp", config(talkers=3, **FIXED))
    texts = [f"{TEXT} {TEXT} {k}" for k in range(3)]
    async with app.async_client(timeout=120) as client:
        slow = {"talker": {"delay_ms": 150}}  # four seconds
        (thinker,), pids = app.states("thinker"), app.pids("thinker")
        running = [asyncio.create_task(ask_chat(client, text, ramp=slow)) for text in texts]

        def has_said_all() -> bool:
            (now,) = app.states("thinker")
            return now.started == thinker.started + 3 and not now.engine.running

        await asyncio.to_thread(wait_until, has_said_all)
        (leaving,) = app.states("thinker")
        assert leaving.ongoing == 3, "it let go of latents that nobody had read"
        changed = config(talkers=1, thinkers=2, **FIXED)
        changing = asyncio.create_task(asyncio.to_thread(change, app.name, httpx.URL(app.url).path, changed))
        assert await asyncio.gather(*running) == [(oracle.pcm(text), text) for text in texts]
        await changing
    assert leaving.replica not in app.settled("thinker", 2)
    await asyncio.to_thread(wait_until, lambda: not set(pids) & set(app.pids("thinker")))


async def test_other_code_never_goes_on_with_a_request(serving: Serving) -> None:
    """A talker of old code dies in its grace; only new code is there: one error event, no mixture of the two."""
    app = serving("ramp", config(width=3, max_takeovers=3))
    async with app.async_client(timeout=120) as client:
        slow = {"thinker": {"delay_ms": 1000}}  # a minute: longer than the roll-out
        running = Hearing(client, CHAT, chat(WORDS, ramp=slow))
        await asyncio.to_thread(wait_until, running.speaks)
        old = app.pids("talker")
        changed = config(width=3, max_takeovers=3)
        changed["stages"]["talker"]["engine"] = {"allow_request_faults": True, "frames_per_token": 4}
        rolling = asyncio.create_task(asyncio.to_thread(change, app.name, httpx.URL(app.url).path, changed))
        await asyncio.to_thread(wait_until, lambda: bool(set(app.pids("talker")) - set(old)))
        for pid in old:
            os.kill(pid, signal.SIGKILL)
        chunks = parse_sse(await running.answer)
        await rolling
        (error,) = [chunk["error"] for chunk in chunks if "error" in chunk]
        assert (error["code"], chunks[-1]["error"]) == (503, error)
        assert "stage talker now runs other code" in error["message"]
        assert oracle.pcm(WORDS).startswith(heard(chunks[:-1])[0])
        pcm, text = await ask_chat(client, TEXT)
        assert (pcm, text) == (oracle.pcm(TEXT, frames_per_token=4), TEXT)


async def test_another_schema_is_refused_before_output(serving: Serving) -> None:
    """C70: a talker that expects version 2 of what the thinker sends: 503 before the first byte, the thinker stops.

    The speech route, which does not cross that edge, goes on.
    """
    from ray import serve

    from omni_ray.serve.builder import bind
    from omni_ray.serve.resolve import AppArgs, resolve

    app = serving("ramp", config(width=3, max_takeovers=3))  # with the talker of the test before, if that has run
    resolved = resolve("ramp", AppArgs(deploy_config=config(width=3, max_takeovers=3)))
    newer = tuple(
        replace(alone, stages=(replace(alone.stages[0], pipeline=_with_schema(resolved.pipeline, 2)),))
        if alone.name == "talker"
        else alone
        for alone in resolved.deployments
    )
    mixed = bind(replace(resolved, deployments=newer))
    await asyncio.to_thread(serve.run, mixed, name=app.name, route_prefix=httpx.URL(app.url).path)
    async with app.async_client() as client:
        for stream in (True, False):
            answer = await client.post("/v1/chat/completions", json=chat(WORDS, stream=stream, ramp=SLOW))
            assert answer.status_code == 503
            message = answer.json()["error"]["message"]
            assert "edge thinker -> talker: schema version 1 arrived, 2 is spoken here" in message
        await asyncio.to_thread(wait_until, lambda: not any(app.working().values()))
        raw = await client.post("/v1/audio/speech", json=speech())
        assert raw.content == oracle.pcm(TEXT)


def _with_schema(pipeline: PipelineConfig, version: int) -> PipelineConfig:
    stages = tuple(
        stage.model_copy(
            update={
                "inputs": tuple(
                    edge.model_copy(update={"schema_version": version}) if edge.source == "thinker" else edge
                    for edge in stage.inputs
                )
            }
        )
        for stage in pipeline.stages
    )
    return pipeline.model_copy(update={"stages": stages})
