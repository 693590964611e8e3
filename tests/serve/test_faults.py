"""What goes wrong in one request or one replica stays there. ``ramp`` with its fault knobs, through real Ray Serve."""

import asyncio
import base64
import contextlib
import json
import os
import random
import signal
import socket
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from omni_ray.models.ramp import oracle
from tests.conftest import PATIENCE_S, SOON, Served, Serving, wait_until
from tests.serve.crowd import CHAT, SPEECH, Hearing
from tests.serve.test_ramp import TEXT, ask_chat, ask_speech, chat, heard, parse_sse, speech

LONG = " ".join(["word"] * 300)
STOPS_S = 8.0
"""What stops "within a second" (DESIGN 6) takes 0.1 s on a quiet machine; asking every stage takes time too. What is
not stopped goes on for longer, or is not counted as cut off."""


def config(width: int = 3) -> dict[str, Any]:
    engine = {"allow_request_faults": True}
    return {
        "stages": {
            "thinker": {"engine": {**engine, "latent_width": width}, "deployment": SOON},
            "talker": {"engine": engine, "deployment": SOON},
            "code2wav": {"engine": {**engine, "chunk_frames": [1, 4]}, "deployment": SOON},
        },
        "ingress": {"deployment": SOON},
    }


@pytest.fixture
def app(serving: Serving) -> Served:
    return serving("ramp", config())


def idle(app: Served, seconds: float = STOPS_S) -> None:
    """Wait until no stage and no ingress has a request."""
    wait_until(lambda: not any(app.ongoing().values()), seconds)


async def until(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    """``wait_until`` beside what the test's own event loop does."""
    await asyncio.to_thread(wait_until, condition, seconds)


def has_runs(app: Served, stage: str, count: int = 1) -> Callable[[], bool]:
    """Whether ``stage`` works on ``count`` requests."""
    return lambda: sum(state.ongoing for state in app.states(stage)) == count


@pytest.mark.parametrize("stage", ["thinker", "talker", "code2wav"])
async def test_a_stage_error_ends_the_request_properly(app: Served, stage: str) -> None:
    """C08, C29: never a hang, never a success; everything upstream stops; the next request is right."""
    fault = {"ramp": {stage: {"fail_at": 2}}}
    async with app.async_client(timeout=20) as client:  # far less than any of our own deadlines
        streamed = await client.post("/v1/chat/completions", json=chat(LONG, **fault))
        if streamed.status_code == 200:
            chunks = parse_sse(streamed.text)
            assert chunks[-1]["error"]["code"] == 500
            assert stage in chunks[-1]["error"]["message"]
            assert not any(c["choices"][0]["finish_reason"] for c in chunks if c.get("choices"))
        else:
            assert streamed.status_code == 500
        buffered = await client.post("/v1/chat/completions", json=chat(LONG, stream=False, **fault))
        assert buffered.status_code == 500
        assert buffered.json()["error"]["code"] == 500
        idle(app)
        assert await ask_speech(client, TEXT) == oracle.pcm(TEXT)


async def test_failure_in_mid_stream_never_looks_like_success(app: Served) -> None:
    """C29: raw audio is cut without the terminating chunk; SSE gets one error event and no done event."""
    fault = {"ramp": {"code2wav": {"fail_at": 3}}}
    async with app.async_client() as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/audio/speech", json=speech(LONG, **fault))
        sse = await client.post("/v1/audio/speech", json=speech(LONG, stream_format="sse", **fault))
    assert sse.text.count("speech.audio.error") >= 1
    assert "speech.audio.done" not in sse.text


async def test_nan_is_an_error_not_silence(app: Served) -> None:
    """C28: a codec that makes NaN fails its request, and only that one."""
    async with app.async_client() as client:
        bad = client.post("/v1/chat/completions", json=chat(LONG, stream=False, ramp={"code2wav": {"nan_at": 5}}))
        good = [ask_speech(client, f"request {k} word") for k in range(4)]
        failed, *answers = await asyncio.gather(bad, *good)
    assert failed.status_code == 500
    assert answers == [oracle.pcm(f"request {k} word") for k in range(4)]


async def test_a_talker_that_never_ends_is_stopped(app: Served) -> None:
    """C23: a cap that follows from the text's length ends it, and the answer says so."""
    async with app.async_client() as client:
        answer = await client.post(
            "/v1/chat/completions", json=chat("hi", stream=False, ramp={"talker": {"no_eos": True}})
        )
        assert answer.json()["choices"][0]["finish_reason"] == "length"
        sse = await client.post(
            "/v1/audio/speech", json=speech("hi", stream_format="sse", ramp={"talker": {"no_eos": True}})
        )
    assert '"truncated": true' in sse.text or '"truncated":true' in sse.text
    idle(app)


async def hang_up(app: Served, body: dict[str, Any], path: str, after_chunks: int, after_s: float) -> None:
    """A client that leaves after ``after_chunks`` pieces of the answer, or after ``after_s``, whichever is first."""
    async with app.async_client() as client:
        with contextlib.suppress(TimeoutError, httpx.HTTPError):
            async with asyncio.timeout(after_s), client.stream("POST", path, json=body) as response:
                pieces = response.aiter_raw()
                for _ in range(after_chunks):
                    await anext(pieces, None)


async def test_hanging_up_stops_every_stage(app: Served) -> None:
    """C07, C11, C13: within ``STOPS_S`` every stage has stopped, no replica restarted, and the next request is right.

    Left alone the first two would go on for half a minute.
    """
    slow = {"ramp": {"thinker": {"delay_ms": 100}}}
    before = app.replicas()
    await hang_up(app, chat(LONG, **slow), "/v1/chat/completions", 2, PATIENCE_S)
    idle(app)
    await hang_up(app, chat(LONG, stream=False, **slow), "/v1/chat/completions", 1, 0.3)  # nothing streamed (C13)
    idle(app)
    rng = random.Random(7)
    await asyncio.gather(
        *(hang_up(app, chat(f"{LONG} {k}", **slow), "/v1/chat/completions", 50, rng.uniform(0, 1)) for k in range(20)),
        *(hang_up(app, speech(f"{LONG} {k}"), "/v1/audio/speech", rng.randint(0, 5), 2) for k in range(20)),
    )
    idle(app)
    async with app.async_client() as client:
        assert await ask_chat(client, TEXT) == (oracle.pcm(TEXT), TEXT)
    assert app.replicas() == before


async def test_curl_that_dies_before_the_first_byte(app: Served) -> None:
    """C07: a socket closed with the request in flight."""
    host, port = httpx.URL(app.url).host, httpx.URL(app.url).port
    body = (
        b'{"model":"ramp","input":"' + LONG.encode() + b'","response_format":"pcm","ramp":{"talker":{"delay_ms":20}}}'
    )
    head = f"POST {httpx.URL(app.url).path}/v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for wait in (0.0, 0.02, 0.2):
        with socket.create_connection((host, port)) as raw:
            raw.sendall(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await asyncio.sleep(wait)
    idle(app)


async def kill(app: Served, stage: str) -> None:
    for pid in app.pids(stage):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("victim", "producer", "edge"), [("talker", "thinker", "actor path"), ("code2wav", "talker", "gRPC")]
)
async def test_a_killed_consumer_stops_its_producers(app: Served, victim: str, producer: str, edge: str) -> None:
    """kill -9 of a consumer: its producer stops within ``STOPS_S``, on both kinds of edge; the stream goes on.

    That its run was cut off shows in the totals: the stream may have been taken over by then.
    """
    slow = {"ramp": {"thinker": {"delay_ms": 60}}}
    text = " ".join(["word"] * 60)
    kept = {stage: tags for stage, tags in app.replicas().items() if stage != victim}
    cut = app.states(producer)[0].cancelled
    async with app.async_client() as client:
        running = Hearing(client, CHAT, chat(text, **slow))
        await until(running.speaks)
        await kill(app, victim)
        await until(lambda: app.states(producer)[0].cancelled == cut + 1, STOPS_S)
        answer = await running.answer
        assert heard(parse_sse(answer)) == (oracle.pcm(text), text)  # taken over, once Serve has another replica
        assert await ask_chat(client, TEXT) == (oracle.pcm(TEXT), TEXT)  # C10: the restarted replica is found and used
    assert {stage: tags for stage, tags in app.replicas().items() if stage != victim} == kept, edge


async def test_a_killed_ingress_stops_the_graph_and_is_told(app: Served) -> None:
    """The ingress is a consumer too: its death ends every stage's work, and Serve brings up another one.

    Every client of it hears of it: events end with one error, a raw stream is cut, and an answer that had not begun is
    made once more, unseen. So the stages may work again when they are asked; their totals say that all four ended.
    """
    slow, slow_speech = {"ramp": {"thinker": {"delay_ms": 30}}}, {"ramp": {"talker": {"delay_ms": 20}}}
    cut = {stage: app.states(stage)[0].cancelled for stage in app.stages()}
    async with app.async_client() as client:
        events = Hearing(client, CHAT, chat(LONG, **slow))
        named = Hearing(client, SPEECH, speech(LONG, stream_format="sse", **slow_speech))
        raw = Hearing(client, SPEECH, speech(LONG, **slow_speech))
        whole = asyncio.create_task(client.post(CHAT, json=chat(LONG, stream=False, **slow)))
        await until(lambda: events.speaks() and named.speaks() and bool(raw.body))
        await until(has_runs(app, "thinker", 2))
        await until(has_runs(app, "code2wav", 4))
        await kill(app, "ingress")
        runs = {"thinker": 2, "talker": 4, "code2wav": 4}
        await until(lambda: all(app.states(s)[0].cancelled == cut[s] + n for s, n in runs.items()), STOPS_S)
        *spoken, last = parse_sse(await events.answer)
        assert last["error"] == {**last["error"], "code": 503, "type": "server_error"}
        pcm, text = heard(spoken)
        assert pcm
        assert oracle.pcm(LONG).startswith(pcm)
        assert LONG.startswith(text)
        assert [line for line in (await named.answer).split("\n\n") if "error" in line] == [
            'event: speech.audio.error\ndata: {"type":"speech.audio.error","error":'
            + json.dumps(last["error"], separators=(",", ":"))
            + "}"
        ]
        with pytest.raises(httpx.RemoteProtocolError):
            await raw.answer
        message = (await whole).json()["choices"][0]["message"]
        assert (base64.b64decode(message["audio"]["data"]), message["audio"]["transcript"]) == (oracle.pcm(LONG), LONG)
        assert await ask_speech(client, TEXT) == oracle.pcm(TEXT)


async def test_a_request_that_showed_nothing_is_retried_once(app: Served) -> None:
    """A replica dies before any event came back: the client never learns of it.

    The thinker's first attempt never speaks, so nothing but a second one can answer.
    """
    async with app.async_client() as client:
        body = chat("one two", ramp={"thinker": {"hang_at": 0, "attempts": 1}})
        running = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await until(has_runs(app, "thinker"))
        await kill(app, "code2wav")
        answer = await running
    assert answer.status_code == 200, answer.text
    assert heard(parse_sse(answer.text)) == (oracle.pcm("one two"), "one two")


async def test_speech_that_made_no_sound_yet_is_retried(app: Served) -> None:
    """The talker dies before the codec's first chunk: nothing was shown, so the client never learns."""
    body = speech("one two three four", ramp={"talker": {"hang_at": 0, "attempts": 1}})
    async with app.async_client() as client:
        running = asyncio.create_task(client.post("/v1/audio/speech", json=body))
        await until(has_runs(app, "talker"))
        await kill(app, "talker")
        answer = await running
    assert (answer.status_code, answer.content) == (200, oracle.pcm("one two three four"))


@pytest.fixture
def small(serving: Serving) -> Served:
    """One place and two in line for the codec, ten for all; some seconds of silence are too many."""
    engine = {"allow_request_faults": True}
    return serving(
        "ramp",
        {
            "stages": {
                "thinker": {"engine": engine},
                "code2wav": {"engine": {**engine, "max_num_seqs": 1, "max_queue": 2}},
            },
            "streaming": {"first_chunk_timeout_s": 5, "idle_timeout_s": 3},
            "ingress": {"max_concurrent_requests": 10},
        },
    )


async def test_overload_is_refused_before_anything_starts(small: Served) -> None:
    """C59: a full last stage refuses with 503 and Retry-After before the thinker starts; nothing is half answered."""
    app = small
    started = app.states("thinker")[0].started

    seen: list[int] = []

    def while_two_wait() -> bool:
        """Count what the thinker has started, at a moment when one request is in the codec and two are in line."""
        if app.states("code2wav")[0].engine.queued != 2:
            return False
        seen.append(app.states("thinker")[0].started - started)
        return app.states("code2wav")[0].engine.queued == 2

    async with app.async_client() as client:
        slow, quick = (chat("one two three", stream=False, ramp={"thinker": {"delay_ms": ms}}) for ms in (1500, 0))
        asked = [asyncio.create_task(client.post(CHAT, json=slow))]
        await until(lambda: app.states("code2wav")[0].engine.running == 1)
        asked += [asyncio.create_task(client.post(CHAT, json=quick)) for _ in range(9)]
        await until(while_two_wait)
        answers = await asyncio.gather(*asked)
    assert seen[-1] == 1, "upstream began for requests that had no place yet"
    codes = sorted(a.status_code for a in answers)
    assert codes == [200] * 3 + [503] * 7
    assert all(int(a.headers["retry-after"]) >= 1 for a in answers if a.status_code == 503)
    assert app.states("thinker")[0].started - started == 3
    idle(app)


async def test_a_stage_that_falls_silent_is_given_up(small: Served) -> None:
    """C08: before its first event and in mid-stream. Until then requests hold their places, and one more is refused."""
    silent = [chat(LONG, modalities=["text"], audio=None, ramp={"thinker": {"hang_at": at}}) for at in (0, 3) * 5]
    async with small.async_client() as client:
        asked = [asyncio.create_task(client.post("/v1/chat/completions", json=body)) for body in silent]
        await until(has_runs(small, "thinker", 10))
        surplus = await client.post("/v1/chat/completions", json=chat())
        assert (surplus.status_code, surplus.headers["retry-after"]) == (503, "1")
        assert "already works on 10 requests" in surplus.json()["error"]["message"]
        answers = await asyncio.gather(*asked)
    for early, late in zip(answers[::2], answers[1::2], strict=True):
        assert early.status_code == 504
        *said, error = parse_sse(late.text)
        assert heard(said) == (b"", "word word word")
        assert error["error"]["code"] == 504
        assert error["error"]["message"] == "stage thinker sent nothing for 3 s"
    idle(small)


async def test_latent_refs_are_freed(serving: Serving) -> None:
    """C15: refs nested in events over the actor path; the object store returns to where it was, errors included."""
    import ray

    app = serving("ramp", config(width=250_000))  # 1 MB per latent row
    async with app.async_client(timeout=120) as client:
        assert await ask_chat(client, TEXT) == (oracle.pcm(TEXT), TEXT)
        idle(app)
        await asyncio.sleep(1)
        free = ray.available_resources()["object_store_memory"]
        for round_ in range(4):
            faults = [{"ramp": {"talker": {"fail_at": 4}}} if k % 10 == 9 else {} for k in range(20)]
            texts = [f"round {round_} request {k} word word" for k in range(20)]
            await asyncio.gather(
                *(client.post("/v1/chat/completions", json=chat(t, **f)) for t, f in zip(texts, faults, strict=True))
            )
        # in mid-stream the store holds what is unread, not everything that ever was
        long = " ".join(["word"] * 60)
        slow = chat(long, ramp={"talker": {"delay_ms": 25}})
        running = asyncio.create_task(client.post("/v1/chat/completions", json=slow))
        await until(has_runs(app, "code2wav"))
        await asyncio.sleep(2)
        assert not running.done()
        held = free - ray.available_resources()["object_store_memory"]
        assert heard(parse_sse((await running).text)) == (oracle.pcm(long), long), "a latent was lost while it waited"
        assert held < 64 * 2**20 + 8 * 2**20, f"{held / 2**20:.0f} MB held"
        await hang_up(app, chat(LONG), "/v1/chat/completions", 3, PATIENCE_S)
        idle(app)
        await until(lambda: ray.available_resources()["object_store_memory"] >= free - 2**20)
