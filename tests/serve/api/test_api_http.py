"""What all routes share: keys, ids, limits, error shapes, health, OpenAPI, log lines, clients that leave."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
from api_fakes import (
    SPEECH_ONLY,
    FakeDispatcher,
    app_of,
    audio,
    b64,
    check_error,
    client_of,
    eventually,
    serving,
    text,
    wav,
)

from omni_ray.config.ingress import IngressConfig
from omni_ray.errors import ConfigError
from omni_ray.serve.api.request_log import WAITED
from omni_ray.serve.api.threads import in_thread
from omni_ray.serve.readiness import Readiness

CHAT = "/v1/chat/completions"
SPEECH = "/v1/audio/speech"
CH: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "one two"}]}
SP: dict[str, Any] = {"model": "m", "input": "private words", "response_format": "pcm"}
JSON = {"content-type": "application/json"}


async def test_health_and_readiness() -> None:
    fake = FakeDispatcher()
    async with client_of(fake, "key") as client:
        assert (await client.get("/health")).json() == {"status": "healthy"}
        assert (await client.get("/ready")).json()["status"] == "ready"
        assert [(await client.head(path)).status_code for path in ("/health", "/ready")] == [200, 200]
        fake.ready = Readiness(False, {"talker": "no replica"})
        response = await client.get("/ready")
        assert response.headers["retry-after"] == "1"
        assert response.json()["waiting"] == {"talker": "no replica"}
        fake.ready = Readiness(False, {"talker": "\n" + "x" * 300, "thinker": "died\nTraceback: secret"})
        assert (await client.get("/ready")).json()["waiting"] == {"talker": "x" * 200, "thinker": "died"}
        check_error(response, 503)
        assert (await client.get("/health")).status_code == 200


async def test_keys() -> None:
    fake = FakeDispatcher(script=text("x"))
    async with client_of(fake, "key-1", "key-2") as client:
        for header in (
            {},
            {"authorization": "Bearer nope"},
            {"authorization": "Basic key-1"},
            {"authorization": "Bearer \xe9"},
        ):
            response = await client.get("/v1/models", headers={k: v.encode("latin-1") for k, v in header.items()})
            error = check_error(response, 401)
            assert error["type"] == "authentication_error"
            assert response.headers["www-authenticate"] == "Bearer"
        for key in ("key-1", "key-2"):
            assert (await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})).status_code == 200
        check_error(await client.post(CHAT, json=CH), 401)
    assert fake.requests == []
    async with client_of(fake) as client:
        assert (await client.post(CHAT, json=CH, headers={"authorization": "Bearer sk-any"})).status_code == 200


async def test_what_a_replica_that_died_had_of_the_clients_patience_counts() -> None:
    fake = FakeDispatcher(script=text("x"))
    async with client_of(fake) as client:
        for said in ("12.250", "-5.000", "1e9", "nan", ""):
            assert (await client.post(CHAT, json=CH, headers={WAITED: said})).status_code == 200
    assert fake.waited == [12.25, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("given", "echoed"),
    [("abc-1.2_Z", True), ("a" * 128, True), ("a" * 129, False), ("a b", False), ("", False), ("a;drop", False)],
)
async def test_request_ids(given: str, echoed: bool) -> None:
    fake = FakeDispatcher(script=text("x"))
    async with client_of(fake) as client:
        response = await client.post(CHAT, json=CH, headers={"x-request-id": given})
        again = await client.post(CHAT, json=CH, headers={"x-request-id": given})
        failed = await client.get("/nope", headers={"x-request-id": given})
    inner = fake.requests[0].request_id
    assert len(inner) == 32
    assert inner != given
    assert inner != fake.requests[1].request_id
    assert response.headers["x-request-id"] == (given if echoed else inner)
    assert again.headers["x-request-id"]
    assert failed.headers["x-request-id"]
    assert response.json()["id"] == f"chatcmpl-{inner}"


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b"{", JSON),
        (b"", JSON),
        (b"[]", JSON),
        (b'"x"', JSON),
        (b"\xff\xfe", JSON),
        (b'{"model": "m", "messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", JSON),
        (b'{"model": "m", "x": ' + b'{"a":' * 5000 + b"1" + b"}" * 5000 + b"}", JSON),
        (b'{"model": "\\ud800"}', JSON),
        (json.dumps(CH).encode(), {"content-type": "text/plain"}),
        (json.dumps(CH).encode(), {}),
        (b"model=m", {"content-type": "application/x-www-form-urlencoded"}),
    ],
)
@pytest.mark.parametrize("url", [CHAT, SPEECH])
async def test_bodies_that_are_no_json_object(url: str, content: bytes, headers: dict[str, str]) -> None:
    """C42: 400, also for malformed JSON."""
    async with client_of(FakeDispatcher()) as client:
        check_error(await client.post(url, content=content, headers=headers), 400)


async def test_unknown_paths_methods_and_models() -> None:
    """C42: 404 for an unknown model."""
    async with client_of(FakeDispatcher()) as client:
        check_error(await client.get("/nope"), 404)
        check_error(await client.post("/v1/audio/nope"), 404)
        response = await client.get(CHAT)
        check_error(response, 405)
        assert response.headers["allow"] == "POST"
        [model] = (await client.get("/v1/models")).json()["data"]
        assert (model["id"], model["object"], model["owned_by"]) == ("m", "model", "omni_ray")
        assert (await client.get("/v1/models/m")).json() == model
        check_error(await client.get("/v1/models/nope"), 404, "model")
        check_error(await client.get("/v1/models/a/b"), 404, "model")


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("url", [CHAT, SPEECH, "/v1/audio/transcriptions"])
async def test_body_limit_also_without_content_length(url: str, chunked: bool) -> None:
    """C55: 413, before anything is parsed."""
    read = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal read
        for _ in range(64):
            read += 1
            yield b"x" * 65_536

    fake = FakeDispatcher(config=IngressConfig(max_body_mb=0.25))
    kind = "multipart/form-data; boundary=b" if "transcr" in url else "application/json"
    start = b'--b\r\ncontent-disposition: form-data; name="file"; filename="f"\r\n\r\n' if "transcr" in url else b""

    async def whole() -> AsyncIterator[bytes]:
        yield start
        async for piece in body():
            yield piece

    async with client_of(fake) as client:
        content: Any = whole() if chunked else start + b"x" * (4 * 2**20)
        check_error(await client.post(url, content=content, headers={"content-type": kind}), 413)
    assert read <= 5


def test_too_large_a_body_over_a_socket() -> None:
    with serving(FakeDispatcher(config=IngressConfig(max_body_mb=1))) as base:
        response = httpx.post(base + CHAT, content=b"x" * (3 * 2**20), headers=JSON)
        check_error(response, 413)
        assert httpx.get(base + "/health").status_code == 200


async def test_unexpected_errors_name_only_the_request(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeDispatcher()

    async def broken() -> Readiness:
        raise ValueError("secret detail")

    fake.readiness = broken  # type: ignore[method-assign]
    async with client_of(fake) as client:
        response = await client.get("/ready", headers={"x-request-id": "mine"})
    error = check_error(response, 500)
    assert error["message"].startswith("internal error, request id ")
    assert error["message"].split()[-1] in caplog.text
    assert "secret detail" in caplog.text


async def test_one_log_line_without_the_text(caplog: pytest.LogCaptureFixture) -> None:
    async with client_of(FakeDispatcher(script=audio(24_000))) as client:
        with caplog.at_level(logging.INFO, "ray.serve.omni_ray"):
            await client.post(SPEECH, json=SP, headers={"x-request-id": "mine"})
            await client.get("/private%20path")
    assert len(caplog.messages) == 2
    assert "client_id=mine key=- POST /v1/audio/speech status=200 outcome=ok" in caplog.messages[0]
    assert "audio_seconds=1.000" in caplog.messages[0]
    assert "unmatched status=404" in caplog.messages[1]
    assert "private" not in caplog.text


async def test_openapi_and_cors() -> None:
    app = app_of(FakeDispatcher())
    document = app.openapi()
    body = document["paths"][SPEECH]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"input", "speed", "fault"} <= set(body["properties"])
    assert "$ref" not in json.dumps(body)
    form = document["paths"]["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]["multipart/form-data"]
    assert "file" in form["schema"]["required"]
    async with client_of(FakeDispatcher()) as client:
        assert (await client.get("/openapi.json")).status_code == 200
        response = await client.get("/health", headers={"origin": "http://evil"})
        assert not [h for h in response.headers if h.startswith("access-control")]


def test_an_extra_may_not_shadow_a_field() -> None:
    from api_fakes import Fault

    with pytest.raises(ConfigError, match="voice"):
        app_of(FakeDispatcher(extras={"voice": Fault}))


# --- clients that leave ---


class Wire:
    """Drives the ASGI application by hand: sends one request, records what is sent, leaves when told."""

    def __init__(
        self, fake: FakeDispatcher, path: str, body: dict[str, Any], kind: bytes = b"application/json"
    ) -> None:
        self.unfinished = False
        self.closed = False
        self.sent: list[Any] = []
        self.left = asyncio.Event()
        self._body = [json.dumps(body).encode() if body else b"--b\r\n"]
        headers = [(b"content-type", kind)]
        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "POST",
            "path": path, "raw_path": path.encode(), "query_string": b"", "headers": headers, "root_path": "",
        }  # fmt: skip
        self.task = asyncio.create_task(app_of(fake)(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._body:
            return {"type": "http.request", "body": self._body.pop(), "more_body": self.unfinished}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if self.closed and message["type"] == "http.response.body":
            raise OSError("closed")
        self.sent.append(message)


LEAVING = [
    (CHAT, {**CH, "stream": True, "stream_options": {"include_usage": True}}),
    (CHAT, CH),
    (CHAT, {**CH, "modalities": ["text", "audio"], "stream": True}),
    (SPEECH, SP),
    (SPEECH, {**SP, "response_format": "mp3"}),
    (SPEECH, {**SP, "stream": False}),
    (SPEECH, {**SP, "stream": True}),
]


@pytest.mark.parametrize("how", ["disconnect", "cancel"])
@pytest.mark.parametrize(("path", "body"), LEAVING)
@pytest.mark.parametrize("silent_at_first", [True, False])
async def test_the_stream_stops_when_the_client_leaves(
    path: str, body: dict[str, Any], how: str, silent_at_first: bool
) -> None:
    words, sound = text("one ", "two"), audio(24_000, 24_000)
    endless = [0.01] * 100_000
    fake = FakeDispatcher(script=[*endless] if silent_at_first else [words[0], sound[0], *endless])
    wire = Wire(fake, path, body)
    await eventually(lambda: fake.steps > 3)
    assert fake.open == 1
    if how == "disconnect":
        wire.left.set()
        await asyncio.wait_for(wire.task, 10)
    else:
        wire.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await wire.task
    assert fake.open == 0
    steps = fake.steps
    await asyncio.sleep(0.03)
    assert fake.steps == steps
    assert not any(m["type"] == "http.response.body" and not m["more_body"] for m in wire.sent)
    assert fake.completed == 0
    assert fake.active == 0
    assert not any(b'"usage":{' in m.get("body", b"") for m in wire.sent)  # C56: nothing after an abort


@pytest.mark.parametrize("path", [CHAT, "/v1/audio/transcriptions"])
async def test_a_client_that_leaves_while_it_sends(path: str, caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeDispatcher()
    wire = Wire(fake, path, {}, b"multipart/form-data; boundary=b" if "transcr" in path else b"application/json")
    wire.unfinished = True
    wire.left.set()
    with caplog.at_level(logging.INFO, "ray.serve.omni_ray"):
        await asyncio.wait_for(wire.task, 10)
    assert wire.sent == []
    assert "outcome=disconnected" in caplog.messages[-1]


async def test_a_send_to_a_closed_socket_is_a_client_that_left(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeDispatcher(script=[*text("one"), *audio(480, 480)])
    wire = Wire(fake, SPEECH, SP)
    wire.closed = True
    with caplog.at_level(logging.INFO, "ray.serve.omni_ray"):
        await asyncio.wait_for(wire.task, 10)
    assert fake.open == 0
    assert [r.levelname for r in caplog.records] == ["INFO"]
    assert "outcome=disconnected" in caplog.messages[-1]


async def test_a_stream_that_ends_well_is_run_to_its_end() -> None:
    """Closed early, the dispatcher would take it for a cancelled one."""
    for path, body in LEAVING:
        fake = FakeDispatcher(script=[*text("one"), *audio(480)])
        async with client_of(fake) as client:
            assert (await client.post(path, json=body)).status_code == 200
        assert fake.completed == 1
        assert fake.open == 0


async def test_many_clients_leaving_a_real_server() -> None:
    """C12: half of them close at odd times while mp3 is encoded; the others get all of it."""

    def script(request: Any) -> list[Any]:
        steps: list[Any] = []
        for event in audio(*[6000] * 8):
            steps += [0.01, event]
        return steps

    fake = FakeDispatcher(SPEECH_ONLY, script)
    sizes: list[int] = []

    async def one(client: httpx.AsyncClient, base: str, n: int) -> None:
        async with client.stream("POST", base + SPEECH, json={**SP, "response_format": "mp3"}) as response:
            if n % 2:
                await asyncio.sleep(0.003 * n)
                return
            sizes.append(len(await response.aread()))

    with serving(fake) as base:
        async with httpx.AsyncClient(limits=httpx.Limits(max_keepalive_connections=0)) as client:
            await asyncio.gather(*(one(client, base, n) for n in range(40)))
        await eventually(lambda: fake.open == 0)
        assert len(set(sizes)) == 1
        assert len(sizes) == 20


async def test_a_cancelled_thread_is_waited_for() -> None:
    done: list[int] = []

    def slow() -> None:
        time.sleep(0.1)
        done.append(1)

    task = asyncio.create_task(in_thread(slow))
    await asyncio.sleep(0.02)
    task.cancel()
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == [1]


@pytest.mark.alone  # it measures time
async def test_decoding_does_not_block_others() -> None:
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 48_000 * 50)
    part = {"type": "input_audio", "input_audio": {"data": b64(wav(noise, 48_000, format="FLAC"))}}
    fake = FakeDispatcher(script=text("x"))
    parts = []  # of the decoding for which the loop stood still
    async with client_of(fake) as client:
        while not parts or (min(parts) >= 0.5 and len(parts) < 3):  # three times in a row it is not the machine
            decoding = asyncio.create_task(
                client.post(CHAT, json={**CH, "messages": [{"role": "user", "content": [part]}]})
            )
            began, worst = time.monotonic(), 0.0
            while not decoding.done():
                at = time.monotonic()
                await asyncio.sleep(0.001)
                worst = max(worst, time.monotonic() - at)
            parts.append(worst / (time.monotonic() - began))
            assert (await decoding).status_code == 200
    assert min(parts) < 0.5, parts
