"""What the proxy says for an ingress replica that died, where real deaths would be hard to time. The rest is in
``test_faults``.
"""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from omni_ray.serve.api.request_log import WAITED
from omni_ray.serve.ingress_loss import REPLAY_BYTES, IngressLoss, middlewares

Dies = Callable[[Send], Any]
EVENTS: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [(b"content-type", b"text/event-stream; charset=utf-8")],
}


class Proxy:
    """Stands for Serve's proxy: returns without a whole answer, as it does when a replica dies."""

    def __init__(self, *deaths: list[Message]) -> None:
        self._deaths = list(deaths)
        self.bodies: list[bytes] = []
        self.waited: list[list[float]] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message["body"]
            more = message["more_body"]
        self.bodies.append(body)
        self.waited.append([float(value) for name, value in scope["headers"] if name == WAITED.encode()])
        scope["headers"].append((b"x-request-id", b"made below"))
        assert sum(name == b"x-request-id" for name, _ in scope["headers"]) == 1
        if self._deaths:
            for message in self._deaths.pop(0):
                await send(message)
        else:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b"right"})


def piece(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def ask(proxy: Proxy, body: bytes = b"{}", path: str = "/app/v1/chat/completions") -> httpx.Response:
    (wrapping,) = middlewares()
    app = wrapping.cls(proxy)
    assert isinstance(app, IngressLoss)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        return await client.post(path, content=body, headers={WAITED: "1000.000"})


async def test_an_answer_that_has_not_begun_is_made_once_more() -> None:
    proxy = Proxy([])
    assert (await ask(proxy, b"as it was")).content == b"right"
    assert proxy.bodies == [b"as it was"] * 2


async def test_the_second_replica_knows_how_long_the_client_has_waited() -> None:
    """A replica on a frozen node took half a minute of it; the next one must not begin from nought (chaos run)."""
    proxy = Proxy([])
    await ask(proxy)
    first, (second,) = proxy.waited
    assert first == [], "what a client says of itself"
    assert 0 <= second < 30


@pytest.mark.parametrize(("deaths", "body"), [(2, b"x"), (1, b"x" * (REPLAY_BYTES + 1))])
async def test_a_second_death_and_a_long_body_are_told(deaths: int, body: bytes) -> None:
    """A request that kills ingress replicas kills two at most."""
    proxy = Proxy(*[[]] * deaths)
    answer = await ask(proxy, body)
    assert len(proxy.bodies) == deaths
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"]["code"] == 503


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/chat/completions", b'data: {"error":{'),
        ("/v1/audio/speech", b'event: speech.audio.error\ndata: {"type":"speech.audio.error","error":{'),
        ("/v1/audio/transcriptions", b'event: error\ndata: {"type":"error","error":{'),
    ],
)
async def test_a_stream_of_events_ends_with_one_error_in_its_routes_words(path: str, last: bytes) -> None:
    proxy = Proxy([EVENTS, piece(b"data: 1\n"), piece(b"\n")])
    answer = await ask(proxy, path=path)
    assert answer.content.startswith(b"data: 1\n\n" + last)
    assert answer.content.count(b'"error":') == 1
    assert len(proxy.bodies) == 1


@pytest.mark.parametrize("half", [[EVENTS, piece(b"data: 1")], [{**EVENTS, "headers": []}, piece(b"\n\n")]])
async def test_half_an_event_and_raw_sound_are_cut(half: list[Message]) -> None:
    """Nothing more is sent: the server then closes the connection without the terminating chunk."""
    with pytest.raises(AssertionError):  # httpx's transport insists on whole answers
        await ask(Proxy(half))


async def test_nobody_is_told_who_has_left() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    proxy = Proxy()
    scope: Scope = {"type": "http", "path": "/v1/audio/speech", "headers": []}
    await IngressLoss(proxy)(scope, receive, send)
    assert (proxy.bodies, sent) == ([], [])
