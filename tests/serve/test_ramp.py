"""``ramp`` through real Ray Serve over HTTP: the stream equals the oracle byte for byte."""

import asyncio
import base64
import contextlib
import io
import itertools
import random
import time
from typing import Any

import httpx
import pytest
import soundfile

from omni_ray.models.ramp import oracle
from tests.conftest import Served, Serving, wait_until
from tests.serve.crowd import CHAT, SPEECH, Client, heard, make_clients, parse_sse

TEXT = "one two three four"


def speech(text: str = TEXT, **more: Any) -> dict[str, Any]:
    return {"model": "ramp", "input": text, "voice": "a", "response_format": "pcm", "stream_format": "audio", **more}


def chat(text: str = TEXT, **more: Any) -> dict[str, Any]:
    return {
        "model": "ramp",
        "messages": [{"role": "user", "content": text}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "a", "format": "pcm16"},
        "stream": True,
        **more,
    }


async def ask_speech(client: httpx.AsyncClient, text: str, **more: Any) -> bytes:
    response = await client.post("/v1/audio/speech", json=speech(text, **more))
    assert response.status_code == 200, response.text
    return response.content


async def ask_chat(client: httpx.AsyncClient, text: str, **more: Any) -> tuple[bytes, str]:
    response = await client.post("/v1/chat/completions", json=chat(text, **more))
    assert response.status_code == 200, response.text
    return heard(parse_sse(response.text))


def config(chunk: int, replicas: int, width: int = 3) -> dict[str, Any]:
    deployment, engine = {"num_replicas": replicas}, {"allow_request_faults": True}
    return {
        "stages": {
            "thinker": {"deployment": deployment, "engine": {**engine, "latent_width": width}},
            "talker": {"deployment": deployment, "engine": engine},
            "code2wav": {"deployment": deployment, "engine": {**engine, "chunk_frames": [chunk]}},
        }
    }


@pytest.mark.parametrize(("chunk", "replicas"), [(1, 1), (4, 2), (25, 1)])
async def test_stream_equals_oracle(serving: Serving, chunk: int, replicas: int) -> None:
    """PCM byte for byte alone, and for 32 clients at once whose every sample must be their own (C01-C03, C38).

    Beside them others are refused, fail, or hang up, and nobody notices (C04, C05, C11, C12, C45, C46).
    """
    app = serving("ramp", config(chunk, replicas))
    clients, rng = make_clients(32, random.Random(chunk)), random.Random(replicas)
    before, slow = app.replicas(), {"talker": {"delay_ms": 4}}
    started = {stage: {s.replica: s.started for s in app.states(stage)} for stage in before}
    async with app.async_client() as http:
        assert await ask_speech(http, TEXT) == oracle.pcm(TEXT)
        assert await ask_chat(http, TEXT) == (oracle.pcm(TEXT), TEXT)

        async def ask(client: Client) -> None:
            await asyncio.sleep(rng.uniform(0, 0.6))
            client.check(await http.post(client.way[0], json=client.request(**slow)), clients)

        async def leave(client: Client) -> None:
            await asyncio.sleep(rng.uniform(0, 0.6))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(rng.uniform(0, 0.3)):
                    await http.post(client.way[0], json=client.request(**slow))

        async def fail(url: str, body: dict[str, Any], status: int, param: str | None) -> None:
            await asyncio.sleep(rng.uniform(0, 0.6))
            answer = await http.post(url, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text

        await asyncio.gather(
            *map(ask, clients), *map(leave, make_clients(16, random.Random(9))), *(fail(*wrong) for wrong in WRONG)
        )
        unseeded = [await ask_speech(http, TEXT, ramp={"noise": True}) for _ in range(2)]
    assert unseeded[0] != unseeded[1]
    assert app.replicas() == before
    if replicas == 2:
        for stage, counts in started.items():
            assert all(s.started > counts[s.replica] for s in app.states(stage)), f"one {stage} alone did all the work"
    wait_until(lambda: not any(app.ongoing().values()))


NO_SOUND = {"data": "UklGRiQAAABXQVZFZm10IBAAAAABAAEAgD4AAAB9AAACABAAZGF0YQAAAAA=", "format": "wav"}
WRONG: list[tuple[str, dict[str, Any], int, str | None]] = [
    (SPEECH, speech(voice="zz"), 400, "voice"),
    (SPEECH, speech(voice=""), 400, "voice"),
    (SPEECH, speech(seed=-1), 400, "seed"),
    (SPEECH, speech(seed=2**63), 400, "seed"),
    (CHAT, chat(audio={"voice": "a", "format": "aac"}), 400, "audio.format"),
    (CHAT, chat(audio={"voice": "a", "format": "flac"}), 400, "audio.format"),
    (
        CHAT,
        chat(messages=[{"role": "user", "content": [{"type": "input_audio", "input_audio": NO_SOUND}]}]),
        400,
        "messages",
    ),
    (CHAT, chat(stream=False, ramp={"code2wav": {"fail_at": 0}}), 500, None),
    (CHAT, chat(stream=False, ramp={"talker": {"fail_at": 3}}), 500, None),
]
"""Requests that are refused or fail, and the field that is named."""


async def test_buffered_answer_is_the_collected_stream(serving: Serving) -> None:
    """C17, C18: the same samples streamed, buffered, as wav, and inside a chat completion."""
    app = serving("ramp", config(4, 2))
    text = " ".join(["word"] * 40)
    async with app.async_client() as client:
        wav = await client.post("/v1/audio/speech", json=speech(text, response_format="wav", stream_format="audio"))
        samples, rate = soundfile.read(io.BytesIO(wav.content), dtype="int16")
        assert (rate, samples.tobytes()) == (24000, oracle.pcm(text))
        answer = (await client.post("/v1/chat/completions", json=chat(text, stream=False))).json()
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == text
    assert base64.b64decode(choice["message"]["audio"]["data"]) == oracle.pcm(text)
    assert answer["usage"]["completion_tokens_details"]["audio_tokens"] == 120


async def test_text_only_never_calls_the_talker(serving: Serving) -> None:
    """C44: with modalities ["text"] the talker and the codec see nothing."""
    app = serving("ramp", config(4, 2))
    before = [sum(s.started for s in app.states(stage)) for stage in ("talker", "code2wav")]
    async with app.async_client() as client:
        answer = await client.post("/v1/chat/completions", json=chat(modalities=["text"], audio=None, stream=False))
    assert answer.json()["choices"][0]["message"]["content"] == TEXT
    assert [sum(s.started for s in app.states(stage)) for stage in ("talker", "code2wav")] == before


async def test_one_message_per_chunk_and_hop(serving: Serving) -> None:
    """A handle hop adds at most one message per chunk: events are coalesced, the first one goes at once."""
    app: Served = serving("ramp", config(25, 1))
    text = " ".join(["word"] * 200)
    sent = {stage: sum(s.messages for s in app.states(stage)) for stage in ("talker", "code2wav")}
    began = time.monotonic()
    async with app.async_client() as client:
        assert await ask_speech(client, text) == oracle.pcm(text)
    took_s, frames = time.monotonic() - began, 600
    sent = {stage: sum(s.messages for s in app.states(stage)) - n for stage, n in sent.items()}
    assert sent["code2wav"] <= frames / 25 + 2
    # a talker that lacks the CPU for its frames sends what it has, 16 lists at first and then one in 20 ms
    assert sent["talker"] <= max(frames / 25 + 2, 18 + took_s / 0.02)


async def test_sound_arrives_as_it_is_made(serving: Serving) -> None:
    """C35: with 200 ms for each of nine chunks the first sound comes long before half of the time, then one by one."""
    app = serving("ramp", config(4, 2))
    text = " ".join(["w"] * 11)
    slow = speech(text, ramp={"code2wav": {"delay_ms": 200}})
    loop = asyncio.get_running_loop()
    async with app.async_client() as client:
        started, arrivals, pcm = loop.time(), [], b""
        async with client.stream("POST", "/v1/audio/speech", json=slow) as response:
            assert response.headers["cache-control"] == "no-cache"
            assert response.headers["x-accel-buffering"] == "no"
            async for piece in response.aiter_raw():
                arrivals.append(loop.time() - started)
                pcm += piece
    assert pcm == oracle.pcm(text)
    assert len(arrivals) >= 5, "a client that had to wait for the CPU finds two of nine together"
    assert arrivals[0] < arrivals[-1] / 2
    gaps = [b - a for a, b in itertools.pairwise(arrivals)]
    assert sorted(gaps)[len(gaps) // 2] > 0.1, "chunks were collected and sent together"


@pytest.mark.parametrize("size", [(1, 1), (1, 40), (3, 7)])
async def test_deficit_and_lookahead_lose_no_sample(serving: Serving, size: tuple[int, int]) -> None:
    """C19, C21: windows that come back 555 samples short cost 555 samples once, for every length and size of chunks."""
    engine = {"deficit": 555, "lookahead": 2, "chunk_frames": [4, 10], "chunk_growth": "lead"}
    app = serving("ramp", {"stages": {"code2wav": {"engine": engine}}})
    async with app.async_client() as client:
        texts = [" ".join(["w"] * n) for n in range(size[0], size[1] + 1)]
        answers = await asyncio.gather(*(ask_speech(client, t) for t in texts))
    assert answers == [oracle.pcm(t, deficit=555) for t in texts]


async def test_async_chunk_off_gives_the_same_bytes(serving: Serving) -> None:
    """A processor that gets everything at once must yield what it yields in pieces."""
    app = serving("ramp", {"async_chunk": False})
    async with app.async_client() as client:
        assert await ask_chat(client, TEXT) == (oracle.pcm(TEXT), TEXT)
