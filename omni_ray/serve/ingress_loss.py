"""What a client hears when the ingress replica that answers it dies. Runs inside Ray Serve's HTTP proxy.

Only the proxy outlives an ingress replica. Left to itself it answers such a request 500 in plain text, or cuts it.
With ``SETTING`` in the environment that Ray is started in, it does what the ingress does for a stage: a request whose
answer has not begun is tried once more, and a stream of events that has begun ends with one error event. A raw stream
is cut without its terminating chunk, which is all that HTTP can say there.

HAProxy mode has no such place: see ``haproxy.py`` for what it does instead; streams that have begun are cut there.
"""

import logging
import time
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni_ray.errors import NotReadyError, ReplicaDiedError
from omni_ray.serve.api import sse
from omni_ray.serve.api.errors import error_body, error_response
from omni_ray.serve.api.request_log import WAITED

logger = logging.getLogger("ray.serve")

SETTING: Final = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
IMPORT_PATH: Final = "omni_ray.serve.ingress_loss:middlewares"
REPLAY_BYTES: Final = 2**20
"""A longer body is not kept for a second try: the proxy serves all, and uploads may be large."""

_ROUTES: Final[dict[str, sse.Route]] = {
    "/chat/completions": "chat",
    "/audio/speech": "speech",
    "/audio/transcriptions": "transcription",
    "/images/generations": "images",
}
_LOST: Final = "the server process that worked on this request is gone"


def middlewares() -> list[Middleware]:
    """What ``SETTING`` names; Ray Serve calls it once, in each proxy."""
    return [Middleware(IngressLoss)]


class IngressLoss:
    """ASGI middleware around Serve's proxy, which returns without a whole answer when the replica is gone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102 - ASGI
        if scope["type"] != "http" or scope["path"].startswith("/-/"):
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        body = _Body(receive)
        for again in (False, True):
            answer = _Answer(send)
            headers = [header for header in scope["headers"] if header[0] != WAITED.encode()]
            if again:
                headers.append((WAITED.encode(), f"{time.monotonic() - began:.3f}".encode()))
            # a copy of the scope: layers below add headers to theirs
            await self._app({**scope, "headers": headers}, body.replayed(), answer.send)
            if answer.ended or body.client_left:
                return
            if answer.begun or again or not body.kept:
                break
            logger.warning("an ingress replica died before it answered a request, which is tried once more")
        await _tell(scope, receive, send, answer)


class _Body:
    """The request's body, kept until it is longer than ``REPLAY_BYTES``.

    Attributes:
        kept: whether all of it that has come can be given again. client_left: the client hung up.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._messages: list[Message] = []
        self._length = 0
        self.kept = True
        self.client_left = False

    def replayed(self) -> Receive:
        """A ``receive`` that begins with what has already come."""
        old = iter(list(self._messages))

        async def receive() -> Message:
            for message in old:
                return message
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.client_left = True
            elif self.kept:
                self._keep(message)
            return message

        return receive

    def _keep(self, message: Message) -> None:
        self._messages.append(message)
        self._length += len(message.get("body", b""))
        if self._length > REPLAY_BYTES:
            self.kept = False
            self._messages.clear()


class _Answer:
    """How far the answer has come.

    Attributes:
        begun: the status line is sent. ended: the body's end too.
        between_events: it is a stream of events, and none of them is half sent.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._events = False
        self._tail = b"\n\n"
        self.begun = False
        self.ended = False

    @property
    def between_events(self) -> bool:
        return self._events and self._tail == b"\n\n"

    async def send(self, message: Message) -> None:
        """An ASGI ``send`` that notes what passes."""
        if message["type"] == "http.response.start":
            self.begun = True
            headers = MutableHeaders(scope=message)
            if (request_id := headers.get("x-request-id")) is not None:
                headers["x-request-id"] = request_id  # the ingress' own; Serve's proxy has put another one behind it
            self._events = headers.get("content-type", "").startswith("text/event-stream")
        elif message["type"] == "http.response.body":
            self._tail = (self._tail + message.get("body", b"")[-2:])[-2:]
            self.ended = not message.get("more_body", False)
        await self._send(message)


async def _tell(scope: Scope, receive: Receive, send: Send, answer: _Answer) -> None:
    """Say that the answer is lost, if HTTP still has a way to say it."""
    if not answer.begun:
        await error_response(NotReadyError(_LOST))(scope, receive, send)
        return
    route = next((route for path, route in _ROUTES.items() if scope["path"].endswith(path)), None)
    if answer.between_events and route is not None:
        last = sse.failure(route, error_body(ReplicaDiedError(_LOST)))
        await send({"type": "http.response.body", "body": last, "more_body": False})
