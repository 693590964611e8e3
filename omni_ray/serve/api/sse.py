"""Server-sent events: how one event is written."""

import json
from collections.abc import Mapping
from typing import Any, Literal

CONTENT_TYPE = "text/event-stream; charset=utf-8"
HEADERS: Mapping[str, str] = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"

Route = Literal["chat", "speech", "transcription", "images"]
_ERROR_TYPES: Mapping[Route, str] = {"speech": "speech.audio.error", "transcription": "error", "images": "error"}


def json_bytes(body: Mapping[str, Any]) -> bytes:
    """Compact UTF-8 JSON. A lone surrogate stays the escape it is in JSON instead of failing."""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace")


def data(body: Mapping[str, Any]) -> bytes:
    """An event without a name, as in chat."""
    return b"data: " + json_bytes(body) + b"\n\n"


def event(body: Mapping[str, Any]) -> bytes:
    """An event named by its ``type``, as in speech and transcription."""
    return f"event: {body['type']}\n".encode() + data(body)


def failure(route: Route, body: Mapping[str, Any]) -> bytes:
    """The end of a stream that failed in its middle; ``body`` is OpenAI's error body."""
    if route == "chat":
        return data(body) + DONE
    return event({"type": _ERROR_TYPES[route], **body})


def comment(words: str) -> bytes:
    """A line that clients skip and people see."""
    return f": {words}\n\n".encode()
