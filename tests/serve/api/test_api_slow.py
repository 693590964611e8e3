"""Slow readers (C37), answers that are too large, and outputs that fall silent (C36)."""

import asyncio
import json
import socket
import time
from typing import Any

import httpx
import numpy as np
import pytest
from api_fakes import FULL, FakeDispatcher, Step, audio, check_error, client_of, eventually, pcm, serving, sse_of, text

from omni_ray.config.ingress import IdleTimeouts, IngressConfig
from omni_ray.engine.types import AudioChunk
from omni_ray.serve.api import live
from omni_ray.serve.api.request_log import RequestInfo
from omni_ray.serve.events import OutputEvent

CHAT = "/v1/chat/completions"
SPEECH = "/v1/audio/speech"
SP: dict[str, Any] = {"model": "m", "input": "hello", "response_format": "pcm"}
CH: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "one"}],
    "modalities": ["text", "audio"],
    "stream": True,
}


def ask(url: str, body: dict[str, Any], buffer: int = 4096) -> socket.socket:
    """A request on a plain socket with a small receive buffer; nothing of the answer is read."""
    raw = json.dumps(body).encode()
    host, port = url.removeprefix("http://").split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    client.connect((host, int(port)))
    head = f"POST {SPEECH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    client.sendall(head.encode() + raw)
    return client


async def test_a_reader_that_stalls_brakes_its_own_stream_and_is_dropped() -> None:
    """C37: where the server sees the reader. It used to keep its place, and its stages, for as long as it liked."""
    config = IngressConfig(send_timeout_s=2, max_answer_mb=1000)
    fake = FakeDispatcher(FULL, audio(*[240_000] * 60), config=config)  # 29 MB: more than any buffer on the way
    with serving(fake) as url, ask(url, SP):
        await eventually(lambda: fake.steps > 0)
        started, braked = time.monotonic(), 0
        while fake.steps > braked:  # until the buffers on the way are full
            braked = fake.steps
            await asyncio.sleep(0.5)
        async with httpx.AsyncClient(base_url=url) as client:
            assert (await client.get("/health")).status_code == 200
        assert fake.steps == braked < 30
        await eventually(lambda: fake.open == fake.active == 0)
        assert time.monotonic() - started > 0.9
        assert fake.completed == 0


async def test_a_slow_reader_that_goes_on_reading_gets_everything() -> None:
    """One long piece is no reason to call a reader stalled: it goes out in blocks."""
    config = IngressConfig(send_timeout_s=2)
    fake = FakeDispatcher(FULL, lambda request: audio(4_000_000), config=config)
    received, ends = bytearray(), pcm(3_999_000, 4_000_000)
    with serving(fake) as url, ask(url, {**SP, "stream": False}, 65_536) as client:
        client.settimeout(30)
        started = time.monotonic()
        while not received.endswith(ends) and (piece := await asyncio.to_thread(client.recv, 200_000)):
            received += piece
            await asyncio.sleep(0.03)
        assert time.monotonic() - started > 2.2
    assert bytes(received[-8_000_000:]) == pcm(0, 4_000_000)


async def test_no_heartbeat_comes_inside_an_event(virtual_time: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long event goes out in blocks; to a reader that paused, the comment line came between two of them."""
    monkeypatch.setattr(live, "HEARTBEAT_S", 0.02)
    event, sent = b"data: " + b"x" * 200_000 + b"\n\n", list[bytes]()

    async def send(message: Any) -> None:
        await asyncio.sleep(0.05)
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def answer() -> live.Answer:
        yield live.Head("text/event-stream", heartbeat=True)
        yield event
        await asyncio.sleep(0.2)
        yield event

    await live.LiveResponse(answer(), RequestInfo(), IngressConfig())({}, receive, send)
    assert b"".join(sent).count(event) == 2
    assert b": ping\n\n" in sent


async def test_the_bytes_of_an_answer_are_capped() -> None:
    """C37: a proxy that hides slow readers from us may have to keep all of it; so much and no more, in every form."""
    config = IngressConfig(max_answer_mb=0.1)
    fake = FakeDispatcher(FULL, [*text("one"), *audio(*[24_000] * 9)], config=config)
    async with client_of(fake) as client:
        whole = check_error(await client.post(SPEECH, json={**SP, "stream": False}), 500)
        assert "max_answer_mb" in whole["message"]
        events = sse_of((await client.post(SPEECH, json={**SP, "stream": True})).text)
        assert [event["type"] for event in events] == ["speech.audio.delta"] * 2 + ["speech.audio.error"]
        chunks = sse_of((await client.post(CHAT, json=CH)).text)
        assert "max_answer_mb" in chunks[-2]["error"]["message"]
        assert chunks[-1] == "[DONE]"
    with serving(fake) as url:
        async with httpx.AsyncClient(base_url=url) as client:
            with pytest.raises(httpx.RemoteProtocolError):
                await client.post(SPEECH, json=SP)
    assert fake.open == fake.active == 0


def sound(at: int, size: int = 480) -> OutputEvent:
    return OutputEvent("talker", AudioChunk(at, np.zeros(size, np.float32), 24_000))


def chat_of(script: list[Step], **limits: float) -> FakeDispatcher:
    return FakeDispatcher(FULL, script, config=IngressConfig(idle_timeout_s=IdleTimeouts(**limits)))


async def test_a_stream_that_talks_is_never_cut_and_one_that_stalls_is(virtual_time: None) -> None:
    """C36: what counts is silence, not length; and of each kind by itself."""
    *words, finish = text("a", "b", "c", "d", "e", "f")
    talks: list[Step] = [step for word in words for step in (0.15, word)]
    async with client_of(chat_of([*talks, finish, *audio(480)], text=0.6, audio=0.6)) as client:
        chunks = sse_of((await client.post(CHAT, json=CH)).text)
        assert "".join(c["choices"][0]["delta"].get("content") or "" for c in chunks[:-1]) == "abcdef"
        assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    fake = chat_of([*words, finish, sound(0), 60], text=60, audio=0.2)
    async with client_of(fake) as client:
        chunks = sse_of((await client.post(CHAT, json=CH)).text)
    assert chunks[-2]["error"]["message"] == "no audio came for 0.2 s"
    assert chunks[-2]["error"]["code"] == 504
    assert chunks[-1] == "[DONE]"
    assert fake.open == fake.active == 0


async def test_sound_may_wait_for_as_long_as_its_text_still_comes(virtual_time: None) -> None:
    *words, finish = text(*"abcdefgh")
    script: list[Step] = [step for word in words for step in (0.15, word)]
    async with client_of(chat_of([*script, finish, *audio(480)], text=60, audio=0.3)) as client:
        chunks = sse_of((await client.post(CHAT, json=CH)).text)
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    late = chat_of([sound(0), *words, finish, 60], text=60, audio=0.2)
    async with client_of(late) as client:
        chunks = sse_of((await client.post(CHAT, json=CH)).text)
    assert chunks[-2]["error"]["message"] == "no audio came for 0.2 s"


async def test_text_that_stops_while_sound_goes_on_is_noticed(virtual_time: None) -> None:
    script: list[Step] = [text("a")[0]]
    for n in range(30):
        script += [0.05, sound(480 * n)]
    async with client_of(chat_of(script, text=0.3, audio=60)) as client:
        chunks = sse_of((await client.post(CHAT, json=CH)).text)
    assert chunks[-2]["error"]["message"] == "no text came for 0.3 s"
