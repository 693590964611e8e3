"""Large, slow and many bodies: what they may cost the others, and what is held while they come."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from api_fakes import FakeDispatcher, audio, check_error, client_of, eventually, text, transcript, wav

from omni_ray.config.ingress import IngressConfig
from omni_ray.engine.types import TextPart
from omni_ray.serve.api import body
from tests import cpu

CHAT = "/v1/chat/completions"
SPEECH = "/v1/audio/speech"
HEARD = "/v1/audio/transcriptions"
CH: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "one two"}]}
JSON = {"content-type": "application/json"}

FORM = {"content-type": "multipart/form-data; boundary=b"}
PART = b'--b\r\ncontent-disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
BODIES: dict[str, tuple[bytes, dict[str, str]]] = {
    CHAT: (json.dumps(CH).encode(), JSON),
    SPEECH: (json.dumps({"model": "m", "input": "x", "response_format": "pcm"}).encode(), JSON),
    HEARD: (
        PART % (b"model", b"", b"m") + PART % (b"file", b'; filename="f"', wav(np.zeros(99))) + b"--b--\r\n",
        FORM,
    ),
}


def fake_of(**limits: Any) -> FakeDispatcher:
    script = [*transcript("x"), *text("one"), *audio(480)]
    return FakeDispatcher(script=script, config=IngressConfig(**limits))


def chat_of(messages: Any, **extra: Any) -> bytes:
    return json.dumps({"model": "m", "messages": messages, **extra}, separators=(",", ":")).encode()


ASK = {"role": "user", "content": "x"}
TOO_MANY: dict[str, Callable[[], bytes]] = {
    "messages": lambda: chat_of([ASK] * 130_000),
    "parts": lambda: chat_of([{"role": "user", "content": [{"type": "text", "text": "x"}] * 130_000}]),
    "unknown fields": lambda: chat_of([ASK], **{f"x{i}": 0 for i in range(400_000)}),
    "lists": lambda: chat_of([ASK], x=[[]] * 1_300_000),
}
JUST_ALLOWED: dict[str, Callable[[], bytes]] = {
    "parts": lambda: chat_of([{"role": "user", "content": [{"type": "text", "text": "x"}] * 97}] * 100),
    "unknown fields": lambda: chat_of([ASK], **{f"x{i}": 0 for i in range(99_000)}),
    "long text": lambda: chat_of([{"role": "user", "content": "x, " * 33_000}] * 3),
}


@pytest.mark.parametrize("kind", TOO_MANY)
async def test_many_tiny_values_hold_up_nobody(kind: str) -> None:
    """C55: 4 MB of them blocked the loop for seconds."""
    raw, fake = TOO_MANY[kind](), fake_of()
    async with client_of(fake) as client:
        with cpu.Bill() as before_the_first:
            big = asyncio.create_task(client.post(CHAT, content=raw, headers=JSON))
            await asyncio.sleep(0)
            async with client.stream("POST", CHAT, json={**CH, "stream": True}) as other:
                first = await anext(other.aiter_raw())
        check_error(await big, 400)
    assert first.startswith(b"data: ")
    assert before_the_first.units < 10
    assert len(fake.requests) == 1


@pytest.mark.parametrize("kind", JUST_ALLOWED)
async def test_the_largest_bodies_hold_up_nobody(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C55: what is let in is read in a thread, and what pydantic does there in one go, letting nobody run, is short."""
    validate, costs = body._validated, list[float]()

    def billed(*args: Any) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        for _ in range(3):
            with cpu.Bill() as bill:
                model = validate(*args)
            costs.append(bill.units)
        return model

    monkeypatch.setattr(body, "_validated", billed)
    fake = fake_of()
    async with client_of(fake) as client:
        response = await client.post(CHAT, content=JUST_ALLOWED[kind](), headers=JSON)
    assert response.status_code == 200, response.text
    assert min(costs) < 60, costs


async def test_a_list_that_is_too_long_is_read_no_further() -> None:
    fake = fake_of(max_messages=3)
    async with client_of(fake) as client:
        error = check_error(
            await client.post(CHAT, content=chat_of([ASK] * 3 + [1] * 99), headers=JSON), 400, "messages"
        )
    assert "at most 3" in error["message"]


async def test_all_text_together_is_limited() -> None:
    """A request travels as one message, which has its own limit."""
    fake = fake_of(max_request_text_chars=10, max_text_chars=10)
    async with client_of(fake) as client:
        five = {"role": "user", "content": [{"type": "text", "text": "123"}, {"type": "text", "text": "45"}]}
        assert (await client.post(CHAT, json={**CH, "messages": [five, five]})).status_code == 200
        check_error(await client.post(CHAT, json={**CH, "messages": [five, five, ASK]}), 400, "messages")
        speech = {"model": "m", "input": "12345678901"}
        check_error(await client.post(SPEECH, json=speech), 400, "input")
    assert fake.requests[0].messages[1].content[1] == TextPart("45")


# --- places and bytes ---


class Upload:
    """A body that comes in two halves; the second when it is told to."""

    def __init__(self, content: bytes) -> None:
        self.more = asyncio.Event()
        self.read = 0
        self._content = content

    async def __aiter__(self) -> AsyncIterator[bytes]:
        half = len(self._content) // 2
        self.read += half
        yield self._content[:half]
        await self.more.wait()
        self.read += len(self._content) - half
        yield self._content[half:]


@pytest.mark.parametrize("url", BODIES)
async def test_a_place_is_taken_before_the_body_is_read(url: str) -> None:
    """C59: overload is answered at once, and a body that nobody has a place for costs nothing."""
    fake = fake_of(max_concurrent_requests=1)
    content, headers = BODIES[url]
    async with client_of(fake, "k") as client:
        headers = {**headers, "authorization": "Bearer k"}
        upload, surplus = Upload(content), Upload(content)
        first = asyncio.create_task(client.post(url, content=upload, headers=headers))
        await eventually(lambda: upload.read > 0)
        assert fake.active == 1
        full = await client.post(url, content=surplus, headers=headers)
        check_error(full, 503)
        assert full.headers["retry-after"] == "1"
        assert surplus.read == 0
        check_error(await client.post(url, content=surplus, headers={**headers, "authorization": "no"}), 401)
        assert (await client.get("/v1/models", headers=headers)).status_code == 200
        upload.more.set()
        assert (await first).status_code == 200
        assert fake.active == 0
        check_error(await client.post(url, content=b"{", headers=headers), 400)
        assert fake.active == 0
        assert (await client.post(url, content=content, headers=headers)).status_code == 200


@pytest.mark.parametrize("url", BODIES)
async def test_a_body_that_stops_coming(virtual_time: None, url: str) -> None:
    """C55: it kept its place for as long as it liked."""
    fake = fake_of(body_idle_timeout_s=0.05)
    content, headers = BODIES[url]
    async with client_of(fake) as client:
        error = check_error(await client.post(url, content=Upload(content), headers=headers), 408)
    assert error["type"] == "timeout_error"
    assert fake.active == 0
    assert fake.requests == []


async def test_a_body_that_drips(virtual_time: None) -> None:
    """C55: 1 kB/s is never silent for long, and would take hours."""

    async def drops() -> AsyncIterator[bytes]:
        for _ in range(500):
            yield b" " * 20
            await asyncio.sleep(0.02)

    fake = fake_of(body_idle_timeout_s=0.2)
    async with client_of(fake) as client:
        check_error(await client.post(CHAT, content=drops(), headers=JSON), 408)


async def test_bodies_together_are_limited() -> None:
    fake = fake_of(max_body_mb=1, max_bodies_mb=1.2)
    large = chat_of([ASK], ignored="x" * 900_000)
    async with client_of(fake) as client:
        upload = Upload(large)
        first = asyncio.create_task(client.post(CHAT, content=upload, headers=JSON))
        await eventually(lambda: upload.read > 0)
        full = await client.post(CHAT, content=large, headers=JSON)
        check_error(full, 503)
        assert full.headers["retry-after"] == "1"
        assert (await client.post(CHAT, json=CH)).status_code == 200
        upload.more.set()
        assert (await first).status_code == 200
        assert (await client.post(CHAT, content=large, headers=JSON)).status_code == 200
