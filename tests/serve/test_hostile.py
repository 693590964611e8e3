"""Hostile clients against real Ray Serve: each gets its error, and nobody else notices."""

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from omni_ray.models.ramp import oracle
from tests.conftest import PATIENCE_S, Served, Serving, wait_until
from tests.serve.test_ramp import ask_chat, chat, speech

CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"
MARK = "zanzibarquagga"
"""A word that stands nowhere else."""


@pytest.fixture
def app(serving: Serving) -> Served:
    """Small limits, so that passing them is quick; ``localhost`` is on the allow-list."""
    stage = {"engine": {"allow_request_faults": True}}
    ingress = {
        "max_body_mb": 4,
        "max_answer_mb": 1,
        "body_idle_timeout_s": 3,
        "media_urls": {"allow": ["http://localhost:8265", "http://[::1]:8265"]},
    }
    return serving("ramp", {"stages": {n: stage for n in ("thinker", "talker", "code2wav")}, "ingress": ingress})


def raw(content: bytes, kind: str = "application/json") -> dict[str, Any]:
    return {"content": content, "headers": {"content-type": kind}}


def part(kind: str, url: str) -> dict[str, Any]:
    content = [{"type": kind, kind: {"url": url}}]
    return {"json": chat(messages=[{"role": "user", "content": content}])}


Attack = tuple[str, dict[str, Any], int, str | None]
ATTACKS: dict[str, Callable[[], Attack]] = {
    "a body that is too large": lambda: (SPEECH, raw(b'{"input": "' + b"x" * 5_000_000), 413, None),
    "a million values": lambda: (CHAT, raw(b'{"x": [' + b"1," * 1_000_000), 400, None),
    "deep nesting": lambda: (CHAT, raw(b'{"x": ' + b"[" * 9_000 + b"]" * 9_000 + b"}"), 400, None),
    "bad UTF-8": lambda: (SPEECH, raw(json.dumps(speech("ab")).encode().replace(b"ab", b"\xff\xfe")), 400, None),
    "an endless number": lambda: (SPEECH, raw(b'{"seed": ' + b"9" * 100_000 + b"}"), 400, None),
    "another content type": lambda: (SPEECH, raw(b"<x/>", "text/xml"), 400, None),
    "a path for a voice": lambda: (SPEECH, {"json": speech(voice="../../../../etc/passwd")}, 400, "voice"),
    "a path for a model": lambda: (SPEECH, {"json": {**speech(), "model": "../../etc/passwd"}}, 404, "model"),
    "a header in a voice": lambda: (SPEECH, {"json": speech(voice="a\r\nx-evil: 1")}, 400, "voice"),
    "no number": lambda: (SPEECH, raw(b'{"model": "ramp", "input": "x", "speed": NaN}'), 400, None),
    "a file": lambda: (CHAT, part("audio_url", "file:///etc/passwd"), 400, "messages[0].content[0].audio_url.url"),
    "metadata": lambda: (CHAT, part("image_url", "http://169.254.169.254/"), 400, None),
    "our own dashboard": lambda: (CHAT, part("audio_url", "http://localhost:8265/api/version"), 400, None),
    "our own dashboard, by number": lambda: (CHAT, part("audio_url", "http://[::1]:8265/"), 400, None),
}


async def attack(client: httpx.AsyncClient, name: str) -> None:
    url, request, status, param = ATTACKS[name]()
    response = await client.post(url, **request)
    assert response.status_code == status, (name, response.text)
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}, name
    assert error["code"] == status, name
    assert param is None or error["param"] == param, name
    assert "Traceback" not in response.text, name
    assert "x-evil" not in response.headers, name


async def test_every_attack_gets_its_error_and_nobody_else_notices(app: Served) -> None:
    """C06, C46, C55: all at once, beside speech that must stay exact; no replica restarts, nothing stays open."""
    before = app.replicas()
    text = "a stream that goes on while others attack " * 3
    async with app.async_client() as client:
        good = [
            asyncio.create_task(ask_chat(client, text.strip(), ramp={"talker": {"delay_ms": 20}})) for _ in range(3)
        ]
        await asyncio.to_thread(wait_until, lambda: app.states("code2wav")[0].ongoing == len(good))
        await asyncio.gather(*(attack(client, name) for name in ATTACKS))
        for answer in good:
            assert await answer == (oracle.pcm(text.strip()), text.strip())
    assert app.replicas() == before
    wait_until(lambda: not any(app.ongoing().values()))


def open_socket(app: Served) -> tuple[socket.socket, str]:
    url = httpx.URL(app.url)
    client = socket.create_connection((url.host, url.port or 80))
    client.settimeout(PATIENCE_S)
    return client, url.path


async def test_a_body_that_stops_coming_is_answered_and_let_go(app: Served) -> None:
    """C55 through Serve's proxy: a slow upload holds its place for a moment, not for ever."""
    client, path = open_socket(app)
    with client:
        head = (
            f"POST {path}{SPEECH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n"
        )
        client.sendall(head.encode() + b'{"model": "ramp", ')
        answer = await asyncio.to_thread(client.recv, 65_536)
    assert b" 408 " in answer.split(b"\r\n")[0]
    wait_until(lambda: not any(app.ongoing().values()))


async def test_what_a_stalled_reader_can_pile_up_is_capped(app: Served) -> None:
    """C37: Serve's own proxy hides slow readers from us, so it keeps what was made; no more than ``max_answer_mb``."""
    body = json.dumps(speech("word " * 300)).encode()  # 3.4 MB of sound
    readers = [open_socket(app) for _ in range(4)]
    for client, path in readers:
        head = f"POST {path}{SPEECH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    async with app.async_client() as client:
        assert (await client.post(SPEECH, json=speech())).content == oracle.pcm("one two three four")
    wait_until(lambda: not any(app.ongoing().values()))
    for client, _ in readers:
        received = 0
        with client:
            while piece := await asyncio.to_thread(client.recv, 1_000_000):
                received += len(piece)
        assert 500_000 < received < 1_100_000


async def test_what_clients_write_is_in_no_log(app: Served, cluster: str) -> None:
    """Neither answered, refused nor failed requests leave their text in any log of Ray's session.

    Serve's access log holds two things that a client chooses: the path and ``x-request-id``.
    """
    import ray

    folder = Path(ray._private.worker._global_node.get_logs_dir_path())
    before = ended(read_all(folder))
    async with app.async_client() as client:
        await ask_chat(client, f"{MARK} one")
        await client.post(f"{SPEECH}?q={MARK}", json=speech(MARK, voice=MARK))
        await client.post(CHAT, content=f'{{"{MARK}"'.encode(), headers={"content-type": "application/json"})
        await client.get("/v1/models", headers={"authorization": f"Bearer {MARK}"})
        for stage in ("thinker", "talker", "code2wav"):
            failed = await client.post(CHAT, json=chat(MARK, stream=False, ramp={stage: {"fail_at": 0}}))
            assert failed.status_code == 500
            assert "ValueError" not in failed.text
        await client.post(CHAT, json=part("audio_url", f"http://localhost:8265/{MARK}?{MARK}")["json"])
    await asyncio.to_thread(wait_until, lambda: ended(read_all(folder)) >= before + 8)  # lines are written a bit later
    logs = read_all(folder)
    assert not [line for text in logs.values() for line in text.splitlines() if MARK.encode() in line]


def ended(logs: dict[str, bytes]) -> int:
    """Lines of the request log."""
    return sum(text.count(b"outcome=") for text in logs.values())


def read_all(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
