"""``colocate``: stages that share one process: ``ramp`` on real Ray Serve, and what a deploy config may not say."""

import asyncio
import json
import os
import signal
from typing import Any

import httpx
import pytest

from omni_ray.cli import main
from omni_ray.errors import ConfigError
from omni_ray.models.ramp import oracle
from omni_ray.serve.resolve import AppArgs, ResolvedApp, resolve
from omni_ray.serve.slack import Report, Tuning, most_loaded
from omni_ray.serve.status import applications
from omni_ray.serve.top import look
from tests.conftest import SOON, Served, Serving, wait_until
from tests.serve.test_ramp import TEXT, ask_chat, ask_speech, chat, speech
from tests.serve.test_takeover import WORDS, dies

WIDE = 60_000
"""Floats in a latent row: 240 kB, more than is sent inline."""
SLOW = {"ramp": {"talker": {"delay_ms": 20}}}
PLACES, QUEUE = 12, 4


@pytest.fixture
def pair(serving: Serving) -> Served:
    """Two replicas of talker and code2wav in one process; latents reach the talker as refs, from two thinkers."""
    two, faults = {"deployment": {**SOON, "num_replicas": 2}}, {"allow_request_faults": True}
    talker = {**faults, "max_num_seqs": PLACES, "max_queue": QUEUE, "reserved_seqs": 0}
    return serving(
        "ramp",
        {
            "colocate": ["talker", "code2wav"],
            "stages": {
                "thinker": {**two, "engine": {**faults, "latent_width": WIDE}},
                "talker": {"engine": talker},
                "code2wav": {**two, "engine": {**faults, "chunk_frames": [1, 4]}},
            },
        },
    )


async def test_same_bytes_alone_in_a_crowd_and_for_those_who_stay(pair: Served) -> None:
    """One stream and 16 at once equal the oracle; clients that hang up leave nothing behind in either stage."""
    before = pair.replicas()
    assert before["talker"] == before["code2wav"]
    assert set(applications()[pair.name].deployments) == {"thinker", "code2wav", "ingress"}

    async def leave(client: httpx.AsyncClient) -> None:
        async with client.stream("POST", "/v1/audio/speech", json=speech(WORDS, **SLOW)) as response:
            async for _ in response.aiter_raw():
                return

    async with pair.async_client() as client:
        assert await ask_speech(client, TEXT) == oracle.pcm(TEXT)
        assert await ask_chat(client, TEXT) == (oracle.pcm(TEXT), TEXT)
        texts = [f"{TEXT} {k}" for k in range(8)]
        spoken = asyncio.gather(*(ask_speech(client, text) for text in texts))
        told = asyncio.gather(*(ask_chat(client, text) for text in texts))
        await asyncio.gather(*(leave(client) for _ in range(4)))
        assert await spoken == [oracle.pcm(text) for text in texts]
        assert await told == [(oracle.pcm(text), text) for text in texts]
    pair.rest()
    wait_until(lambda: not any(s.held_refs for stage in pair.stages() for s in pair.states(stage)))
    assert pair.replicas() == before
    for talker, codec in zip(pair.states("talker"), pair.states("code2wav"), strict=True):
        assert talker.started == codec.started > 0, "a code2wav called a talker elsewhere"
    for stage in ("talker", "code2wav"):
        states = pair.states(stage)
        assert sum(s.finished for s in states) == 2 + 16
        assert sum(s.cancelled for s in states) == 4
        assert sum(s.started for s in states) == 2 + 16 + 4


async def test_a_full_talker_and_top(pair: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """A guest that has no room refuses with 503 before anything starts; ``top`` shows both stages meanwhile."""
    most = 2 * (PLACES + QUEUE)
    async with pair.async_client() as client:
        asked = [
            asyncio.create_task(client.post("/v1/audio/speech", json=speech(f"{WORDS} {k}", **SLOW)))
            for k in range(most + 12)
        ]
        await asyncio.to_thread(wait_until, lambda: sum(s.engine.queued for s in pair.states("talker")) > 0)
        (view,) = await asyncio.to_thread(look, pair.name)
        answers = await asyncio.gather(*asked)
    assert [stage.name for stage in view.stages] == ["thinker", "talker", "code2wav"]
    assert [state.stage for stage in view.stages for state in stage.replicas] == [
        "thinker", "thinker", "talker", "talker", "code2wav", "code2wav",
    ]  # fmt: skip
    refused = [answer for answer in answers if answer.status_code != 200]
    assert 0 < len(refused) < len(answers)
    assert {(answer.status_code, "retry-after" in answer.headers) for answer in refused} == {(503, True)}
    for k, answer in enumerate(answers):
        assert answer.status_code == 503 or answer.content == oracle.pcm(f"{WORDS} {k}")
    pair.rest()


async def test_takeover(pair: Served) -> None:
    """Either stage kills the process they share, or SIGKILL does, in mid-stream: every client gets the same bytes."""
    before = pair.settled("code2wav", 2)
    async with pair.async_client(timeout=120) as client:
        slower = {"ramp": {"talker": {"delay_ms": 40}}}
        running = asyncio.gather(*(ask_chat(client, f"{WORDS} {k}", **slower) for k in range(8)))
        await asyncio.to_thread(wait_until, lambda: all(s.leads for s in pair.states("code2wav")))
        os.kill(pair.pids("code2wav")[0], signal.SIGKILL)
        assert await running == [(oracle.pcm(f"{WORDS} {k}"), f"{WORDS} {k}") for k in range(8)]
        await asyncio.to_thread(pair.settled, "code2wav", 2)
        assert await ask_chat(client, WORDS, **dies("talker", 45)) == (oracle.pcm(WORDS), WORDS)
    assert len(before - await asyncio.to_thread(pair.settled, "code2wav", 2)) >= 1


async def test_a_pipeline_in_one_process(serving: Serving) -> None:
    """All three stages, of which the ingress calls two: latents stay where they are, within a window of two rows."""
    app = serving(
        "ramp",
        {
            "colocate": ["code2wav", "thinker", "talker"],
            "stages": {"thinker": {"engine": {"latent_width": WIDE}}, "talker": {"engine": {"pace_ms": 5}}},
            "streaming": {"window_mb": 0.5},
        },
    )
    texts = [f"{WORDS} {k}" for k in range(3)]
    async with app.async_client() as client:
        asked = asyncio.gather(*(ask_chat(client, text) for text in texts))
        assert await ask_chat(client, WORDS, modalities=["audio"]) == (oracle.pcm(WORDS), ""), (
            "only then a window waits"
        )
        text_only = await client.post("/v1/chat/completions", json=chat(modalities=["text"], audio=None, stream=False))
        assert text_only.json()["choices"][0]["message"]["content"] == TEXT
        assert await asked == [(oracle.pcm(text), text) for text in texts]
        failed = await client.post("/v1/audio/speech", json=speech(voice="zz"))
        assert failed.status_code == 400
    app.rest()
    states = {stage: app.states(stage)[0] for stage in app.stages()}
    assert {stage: s.started for stage, s in states.items()} == {"thinker": 5, "talker": 4, "code2wav": 4}
    assert {s.held_refs for s in states.values()} == {0}


def resolved(**config: Any) -> ResolvedApp:
    return resolve("ramp", AppArgs(deploy_config=config))


def deployment(**options: Any) -> dict[str, Any]:
    return {"deployment": options}


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"colocate": ["talker"]}, "colocate: names one stage only; name two or more, or leave it out, got ['talker']"),
        ({"colocate": ["talker", "talker"]}, "colocate: names 'talker' twice, got ['talker', 'talker']"),
        (
            {"colocate": ["tolker", "code2wav"]},
            "colocate: unknown stage 'tolker'; did you mean 'talker'? known: code2wav, talker, thinker",
        ),
        (
            {"colocate": ["thinker", "code2wav"]},
            "colocate: stage 'talker' lies between stages of thinker, code2wav; name it too",
        ),
        (
            {"colocate": ["talker", "code2wav"], "stages": {"talker": deployment(num_replicas=2)}},
            "stages.talker.deployment.num_replicas: talker runs in the replicas of code2wav (colocate); give it at "
            "stages.code2wav.deployment.num_replicas",
        ),
        (
            {
                "colocate": ["talker", "code2wav"],
                "stages": {"talker": deployment(ray_actor_options={"accelerator_type": "H200"})},
            },
            "stages.talker.deployment.ray_actor_options.accelerator_type: talker runs in the replicas of code2wav "
            "(colocate); give it at stages.code2wav.deployment.ray_actor_options.accelerator_type",
        ),
        (
            {
                "colocate": ["talker", "code2wav"],
                "stages": {
                    "talker": deployment(ray_actor_options={"num_gpus": 0.8}),
                    "code2wav": deployment(ray_actor_options={"num_gpus": 0.4}),
                },
            },
            "colocate: talker, code2wav have num_gpus 1.2 together; they share one GPU, so lower "
            "stages.code2wav.deployment.ray_actor_options.num_gpus or another's",
        ),
    ],
)
def test_what_a_config_may_not_say(config: dict[str, Any], problem: str):
    with pytest.raises(ConfigError) as error:
        resolved(**config)
    assert error.value.problems == (f"deploy_config: {problem}",)


def test_a_stage_that_must_be_alone(monkeypatch: pytest.MonkeyPatch):
    """An engine whose steps change the state of the whole process shares it with nobody."""
    from omni_ray.models.ramp.options import TalkerOptions

    monkeypatch.setattr(TalkerOptions, "own_process", "it swaps the random state")
    with pytest.raises(ConfigError, match=r"stages.talker.engine: cannot be one of colocate: it swaps the random"):
        resolved(colocate=["talker", "code2wav"])


def test_one_replica_needs_what_its_stages_need(capsys: pytest.CaptureFixture[str]):
    """Amounts are added up; the last stage's options are the group's, and a guest may repeat them."""
    config = {
        "colocate": ["talker", "code2wav"],
        "stages": {
            "talker": deployment(
                num_replicas=2, ray_actor_options={"num_cpus": 2, "num_gpus": 0.2, "resources": {"seat": 1}}
            ),
            "code2wav": deployment(
                num_replicas=2, ray_actor_options={"num_gpus": 0.1, "memory": 2**30, "label_selector": {"zone": "b"}}
            ),
        },
    }
    thinker, shared = resolved(**config).deployments
    assert (thinker.name, shared.name, [s.stage for s in shared.stages]) == (
        "thinker", "code2wav", ["talker", "code2wav"],
    )  # fmt: skip
    assert shared.derived.serve["ray_actor_options"] == {
        "num_cpus": 2.1, "num_gpus": 0.3, "resources": {"seat": 1}, "memory": 2**30, "label_selector": {"zone": "b"},
    }  # fmt: skip
    bundle = {"CPU": 2.1, "GPU": 0.3, "seat": 1.0, "memory": 2.0**30}
    assert shared.derived.serve["placement_group_bundles"] == [bundle]
    assert main(["plan", "ramp", f"deploy_config={json.dumps(config)}"]) == 0
    out = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "talker per_request RampTalker in the process of code2wav" in out
    assert (
        f"code2wav codec RampCode2Wav 2 2.1 CPU, 1 seat, 0.3 GPU, 1.07374e+09 memory placement group [{bundle}]" in out
    )
    assert "in all: 4.4 CPU, 2 seat, 0.6 GPU, 2.14748e+09 memory" in out
    assert "talker -> code2wav: frames_of_talker, schema 1, one process" in out


def test_the_stage_with_most_to_do_speaks_for_the_replica():
    idle, busy = Report(1, 0, 10, 0, 60, 0), Report(2, 0, 2, 0, 60, 0)
    late = Report(1, 0, 10, 0, 0.1, 0)
    assert most_loaded([idle, busy], Tuning()) == busy
    assert most_loaded([late, idle], Tuning()) == late
