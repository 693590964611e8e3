"""A replica dies in mid-stream and another one goes on: the client gets the same bytes. ``ramp``, real Ray Serve."""

import asyncio
import json
import os
import signal
from collections import Counter
from typing import Any

import httpx
import pytest

from omni_ray.models.ramp import oracle
from tests.conftest import SOON, Served, Serving, wait_until
from tests.monitoring.test_metrics import scrape, scraped_when, total
from tests.serve.crowd import CHAT, SPEECH, Hearing, heard, parse_sse
from tests.serve.test_ramp import TEXT, ask_chat, chat, speech

WORDS = " ".join(f"w{k}" for k in range(30))
MIDDLE = {"thinker": 15, "talker": 45, "code2wav": 11}
LAST = {"thinker": 29, "talker": 89, "code2wav": 23}
"""Units of each stage while it answers ``WORDS``: tokens, frames, decode calls."""


def config(
    width: int = 3, talkers: int = 2, others: int = 2, talker: dict[str, Any] | None = None, **ingress: Any
) -> dict[str, Any]:
    engine = {"allow_request_faults": True}
    several = {"deployment": {**SOON, "num_replicas": others}}
    return {
        "stages": {
            "thinker": {**several, "engine": {**engine, "latent_width": width}},
            "talker": {"deployment": {**SOON, "num_replicas": talkers}, "engine": {**engine, **(talker or {})}},
            "code2wav": {**several, "engine": {**engine, "chunk_frames": [1, 4]}},
        },
        "ingress": ingress,
    }


@pytest.fixture
def app(serving: Serving) -> Served:
    """With a talker more than a poison request may kill."""
    return serving("ramp", config(talkers=3))


def dies(stage: str, unit: int, attempts: int | None = 1) -> dict[str, Any]:
    """Request faults: ``stage`` kills its process at ``unit``; the first stages are slow, so that all run at once."""
    faults: dict[str, Any] = {"thinker": {"delay_ms": 25}, "talker": {"delay_ms": 10}}
    faults[stage] = {**faults.get(stage, {}), "kill_at": unit, "attempts": attempts}
    return {"ramp": faults}


def attempts_begun(app: Served, stage: str) -> int:
    return sum(state.started for state in app.states(stage))


@pytest.mark.parametrize("stage", ["thinker", "talker", "code2wav"])
async def test_before_the_first_byte(app: Served, stage: str) -> None:
    async with app.async_client(timeout=120) as client:
        assert await ask_chat(client, TEXT, **dies(stage, 0)) == (oracle.pcm(TEXT), TEXT)


async def test_every_stage_dies_in_mid_stream_and_at_its_end(serving: Serving) -> None:
    """Six requests, each of which kills a stage under all others, and three that do no harm; latents cross as refs."""
    app = serving("ramp", config(width=60_000, max_takeovers=20))
    async with app.async_client(timeout=180) as client:
        deaths = [dies(stage, units[stage]) for units in (MIDDLE, LAST) for stage in units]
        deaths += [{"ramp": {"thinker": {"delay_ms": 25}}}] * 3
        texts = [f"{WORDS} {k}" for k in range(len(deaths))]
        answers = await asyncio.gather(*(ask_chat(client, t, **d) for t, d in zip(texts, deaths, strict=True)))
    assert answers == [(oracle.pcm(t), t) for t in texts]


async def test_routes_hear_of_nothing(app: Served) -> None:
    """Speech events, a file and a buffered chat: one end, usage counted once, one continuous encoder."""
    async with app.async_client(timeout=120) as client:
        sse = await client.post("/v1/audio/speech", json=speech(WORDS, stream_format="sse", **dies("talker", 45)))
        events = [json.loads(line[6:]) for line in sse.text.splitlines() if line.startswith("data: ")]
        assert [e["type"] for e in events[:-1]] == ["speech.audio.delta"] * (len(events) - 1)
        assert events[-1]["type"] == "speech.audio.done"
        assert events[-1]["usage"]["output_tokens"] == 90
        buffered = (
            await client.post("/v1/chat/completions", json=chat(WORDS, stream=False, **dies("code2wav", 11)))
        ).json()
        assert buffered["choices"][0]["message"]["content"] == WORDS
        assert buffered["choices"][0]["finish_reason"] == "stop"
        assert buffered["usage"]["prompt_tokens"] == 30
        assert buffered["usage"]["completion_tokens_details"]["text_tokens"] == 30
        assert buffered["usage"]["completion_tokens_details"]["audio_tokens"] == 90
        flac = [
            await client.post("/v1/audio/speech", json=speech(WORDS, response_format="flac", **fault))
            for fault in (dies("code2wav", 11), {})
        ]
        assert flac[0].content == flac[1].content


LEAVERS = 24


async def test_who_hangs_up_is_no_death(serving: Serving) -> None:
    """Clients of both routes leave while every stage works for them: nothing is taken over, nothing begins again.

    Serve cancels the calls of a request that it cancels before the task that made them, at every edge.
    """
    app = serving("ramp", config(width=60_000, max_takeovers=20))
    before = {stage: totals(app, stage) for stage in app.stages()}
    already = total(scrape(), app, "requests_retried")
    slow = {"ramp": {"thinker": {"delay_ms": 100}, "talker": {"delay_ms": 33}}}
    async with app.async_client() as client:
        text = " ".join([WORDS] * 4)  # twelve seconds: the last must speak before the first has said all
        bodies = [(CHAT, chat(text, **slow)), (SPEECH, speech(text, stream_format="sse", **slow))]
        leavers = [Hearing(client, *bodies[k % 2]) for k in range(LEAVERS)]
        await asyncio.to_thread(wait_until, lambda: all([leaver.speaks() for leaver in leavers]))
        for leaver in leavers:
            leaver.answer.cancel()
        await asyncio.gather(*(leaver.answer for leaver in leavers), return_exceptions=True)
    await asyncio.to_thread(app.rest)
    for stage, counts in before.items():
        now = totals(app, stage)
        now.subtract(counts)
        theirs = LEAVERS // 2 if stage == "thinker" else LEAVERS  # speech needs no thinker
        assert +now == {"started": theirs, "cancelled": theirs}, stage
    left = {"requests": ({"outcome": "disconnected"}, float(LEAVERS))}
    assert total(await scraped_when(app, left), app, "requests_retried") == already


def totals(app: Served, stage: str) -> Counter[str]:
    """How the runs of ``stage`` ended, over its replicas."""
    counts: Counter[str] = Counter()
    for state in app.states(stage):
        counts += Counter(
            started=state.started, finished=state.finished, refused=state.refused, failed=state.failed,
            cancelled=state.cancelled,
        )  # fmt: skip
    return counts


def all_computed(app: Served) -> bool:
    """The thinker's engine is done, and refs of its wait to be read."""
    states = app.states("thinker")
    return not any(state.engine.running for state in states) and any(state.held_refs for state in states)


async def test_latents_whose_owner_died(serving: Serving) -> None:
    """The thinker has sent all its refs and dies before they are read: no hang, no error, the same bytes."""
    app = serving("ramp", config(width=60_000, max_takeovers=20))
    async with app.async_client(timeout=120) as client:
        running = Hearing(client, CHAT, chat(WORDS, ramp={"talker": {"delay_ms": 50}}))
        await asyncio.to_thread(wait_until, lambda: running.speaks() and all_computed(app))
        for pid in app.pids("thinker"):
            os.kill(pid, signal.SIGKILL)
        assert heard(parse_sse(await running.answer)) == (oracle.pcm(WORDS), WORDS)


async def test_a_poison_request_is_taken_over_once(app: Served) -> None:
    """It speaks and then kills its talker, always: two replicas die, the client gets one error event; others go on."""
    before = app.settled("talker", 3)
    async with app.async_client(timeout=120) as client:
        answer = await client.post("/v1/chat/completions", json=chat(WORDS, **dies("talker", 45, attempts=None)))
        one_error(answer, 503, "talker died")
        assert await ask_chat(client, TEXT) == (oracle.pcm(TEXT), TEXT)
    assert len(before - app.settled("talker", 3)) <= 2


async def test_a_poison_request_kills_at_most_two_replicas(app: Served) -> None:
    """A request that kills whatever computes it is tried twice, not at every hop; others go on.

    Speech: it shows nothing before the talker's first frame, where a chat's text may begin the answer before the second
    death, which its stream then tells.
    """
    before = app.settled("talker", 3)
    async with app.async_client() as client:
        answer = await client.post("/v1/audio/speech", json=speech("one two", ramp={"talker": {"kill_at": 0}}))
        assert answer.status_code == 503
        assert await ask_chat(client, TEXT) == (oracle.pcm(TEXT), TEXT)
    assert len(before - app.settled("talker", 3)) <= 2


async def test_an_engine_that_cannot_go_on(serving: Serving) -> None:
    """``resumable: none`` anywhere in the sub-graph: one proper error event, whichever stage died."""
    app = serving("ramp", config(talkers=1, others=1, talker={"resumable": False}))
    async with app.async_client(timeout=120) as client:
        answer = await client.post("/v1/chat/completions", json=chat(WORDS, **dies("code2wav", 11)))
        one_error(answer, 503, "talker cannot go on elsewhere")
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/audio/speech", json=speech(WORDS, **dies("talker", 45)))


def one_error(answer: httpx.Response, code: int, words: str) -> None:
    """A stream that spoke, then one error event, and no finish reason."""
    chunks = parse_sse(answer.text)
    errors = [chunk["error"] for chunk in chunks if "error" in chunk]
    assert len(errors) == 1, errors
    assert chunks[-1]["error"]["code"] == code
    assert words in errors[0]["message"]
    pcm, text = heard(chunks[:-1])
    assert pcm
    assert oracle.pcm(WORDS).startswith(pcm)
    assert WORDS.startswith(text)
    assert not any(chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1])
