"""Outermost layer: the server's own request id, one log line per request, and the 500 for what nobody expected."""

import asyncio
import contextlib
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from omni_ray.serve.api.errors import error_response, log, public_error
from omni_ray.serve.api.keys import ANONYMOUS
from omni_ray.serve.logs import log_request

_CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_STATE = "omni_ray_request"
_SECONDS = re.compile(r"\d{1,5}\.\d{3}")
WAITED = "x-omni-ray-waited"
"""Request header of ``ingress_loss``: seconds that the client has already waited for a replica that died."""


@dataclass(slots=True)
class RequestInfo:
    """What is known of one HTTP request while it runs.

    Attributes:
        request_id: made here; the client's own id is never used inside.
        client_id: the client's ``x-request-id`` if it is harmless; echoed instead of ours.
        traceparent: W3C trace context, or None.
        waited_s: what another ingress replica had of the client's patience before it died.
        api_key: the key's name, set by the key check.
        served_s: what its key had been served before it, see ``Shares``.
        status: 0 until the status line is sent. refused: it told the client to come back later.
        audio_seconds: sound sent so far. clipped: its samples that lay outside [-1, 1].
        outcome: ``ok``, ``disconnected``, or the error that ended a stream in its middle.
        held: what the request holds until it is over, however it ends: its place in the server.
    """

    request_id: str = field(default_factory=lambda: secrets.token_hex(16))
    client_id: str | None = None
    traceparent: str | None = None
    waited_s: float = 0.0
    api_key: str = ANONYMOUS
    served_s: float = 0.0
    status: int = 0
    refused: bool = False
    audio_seconds: float = 0.0
    clipped: int = 0
    outcome: str = "ok"
    held: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)


def info_of(request: Request) -> RequestInfo:
    """The ``RequestInfo`` that ``RequestLog`` made for this request."""
    return cast(RequestInfo, request.scope["state"][_STATE])


class AbortedResponse(Exception):
    """A body broke off in its middle; raised to the server, so that no terminating chunk is sent (C29)."""


class RequestLog:
    """ASGI middleware. ``ended`` gets each request's route, outcome (as metrics count it) and seconds."""

    def __init__(self, app: ASGIApp, ended: Callable[[str, str, float], None]) -> None:
        self._app = app
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: D102 - ASGI
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        info = RequestInfo(
            client_id=_matching(_CLIENT_ID, headers.get("x-request-id")),
            traceparent=_matching(_TRACEPARENT, headers.get("traceparent")),
            waited_s=float(_matching(_SECONDS, headers.get(WAITED)) or 0),
        )
        scope = {**scope, "state": {**scope.get("state", {}), _STATE: info}}
        log_request(info.request_id)
        started = time.monotonic()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                info.status, info.refused = message["status"], "retry-after" in headers
                headers["x-request-id"] = info.client_id or info.request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            info.outcome = "disconnected"
        except AbortedResponse:
            raise
        except asyncio.CancelledError:
            info.outcome = "disconnected"
            raise
        except Exception as error:
            if info.status:
                info.outcome = type(error).__name__
                raise
            await error_response(public_error(error, info.request_id))(scope, receive, send_with_id)
        finally:
            info.held.close()
            seconds = time.monotonic() - started
            self._ended(_route(scope), _counted(info), seconds)
            _log_line(scope, info, seconds)


def _matching(pattern: re.Pattern[str], value: str | None) -> str | None:
    return value if value is not None and pattern.fullmatch(value) else None


def _route(scope: Scope) -> str:
    """The route's path; one word for all unknown ones, so that strangers cannot make up metric labels."""
    route = scope.get("route")
    return str(route.path) if route is not None else "unmatched"


def _counted(info: RequestInfo) -> str:
    """The outcome as metrics count it; in a stream that had begun, an error is ``failed`` whatever it is."""
    if info.outcome == "disconnected":
        return "disconnected"
    if info.refused:
        return "refused"
    if 400 <= info.status < 500:
        return "invalid"
    return "ok" if info.outcome == "ok" and info.status < 500 else "failed"


def _log_line(scope: Scope, info: RequestInfo, seconds: float) -> None:
    """For people in the message, for programs as fields of their own; nothing that was said."""
    fields = {
        "client_id": info.client_id or "-",
        "key": info.api_key or "-",
        "method": scope["method"],
        "path": _route(scope),
        "status": info.status,
        "outcome": info.outcome,
        "seconds": round(seconds, 3),
        "audio_seconds": round(info.audio_seconds, 3),
        "clipped": info.clipped,
    }
    log.info(
        "request %s client_id=%s key=%s %s %s status=%d outcome=%s seconds=%.3f audio_seconds=%.3f clipped=%d",
        info.request_id,
        *fields.values(),
        extra=fields,
    )
