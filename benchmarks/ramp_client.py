"""A client of ``ramp`` that checks every byte as it comes, for ``chaos.py`` and ``soak.py``."""

import asyncio
import base64
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Literal

import httpx

from omni_ray.models.ramp import oracle

Route = Literal["speech", "speech sse", "chat sse", "chat"]
ROUTES: tuple[Route, ...] = ("speech", "speech sse", "chat sse", "chat")
VOICES = "abcdefgh"

Outcome = Literal["right", "wrong", "told", "cut", "untold", "hung"]
"""What became of a request.

right: every byte, and a proper end. wrong: a sample or a word that is not the oracle's, or a missing one under a clean
end. told: an OpenAI error body, or one error event. cut: the connection ended without its terminating chunk, as a raw
stream must. untold: any other failure. hung: no end within the deadline.
"""


@dataclass(frozen=True, slots=True)
class Answer:
    """One request; times are ``time.monotonic()``. ``longest_gap_s`` is between two pieces of sound."""

    route: Route
    started: float
    ended: float
    outcome: Outcome
    detail: str = ""
    first_sound_s: float | None = None
    longest_gap_s: float = 0.0


class _Heard:
    """What a client has of an answer so far."""

    def __init__(self, text: str, voice: str) -> None:
        self.wanted_text, self.wanted = text, oracle.pcm(text, voice)
        self.text, self.pcm = "", b""
        self.first: float | None = None
        self.last = self.longest_gap = 0.0

    def sound(self, pcm: bytes) -> None:
        if not pcm:
            return
        now = time.monotonic()
        if self.first is None:
            self.first = self.last = now
        self.longest_gap, self.last = max(self.longest_gap, now - self.last), now
        self.pcm += pcm

    def good_so_far(self) -> bool:
        return self.wanted.startswith(self.pcm) and self.wanted_text.startswith(self.text)

    def complete(self, with_text: bool) -> bool:
        return self.pcm == self.wanted and (not with_text or self.text == self.wanted_text)


class _Told(Exception):
    """The server said in a proper way that it failed."""


async def ask(
    client: httpx.AsyncClient,
    route: Route,
    text: str,
    voice: str = "a",
    deadline_s: float = 60,
    faults: dict[str, Any] | None = None,
) -> Answer:
    """Send one request, follow its answer to the end, and judge it."""
    started, heard = time.monotonic(), _Heard(text, voice)
    outcome: Outcome = "right"
    detail = ""
    try:
        async with asyncio.timeout(deadline_s):
            await _follow(client, route, text, voice, faults, heard)
        if not heard.complete(route.startswith("chat")):
            outcome, detail = "wrong", f"{len(heard.pcm)} of {len(heard.wanted)} bytes under a clean end"
    except TimeoutError:
        outcome = "hung"
    except _Told as error:
        outcome, detail = "told", str(error)
    except (httpx.RemoteProtocolError, httpx.ReadError) as error:
        outcome, detail = "cut", repr(error)
    except Exception as error:  # a client reports whatever happens to it
        outcome, detail = "untold", repr(error)
    if not heard.good_so_far():
        outcome, detail = "wrong", f"after {len(heard.pcm)} bytes; {detail}"
    first = None if heard.first is None else heard.first - started
    return Answer(route, started, time.monotonic(), outcome, detail[:200], first, heard.longest_gap)


def body(route: Route, text: str, voice: str, faults: dict[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """Path and JSON of a request."""
    more = {} if faults is None else {"ramp": faults}
    if route.startswith("speech"):
        framing = "sse" if route == "speech sse" else "audio"
        speech = {"model": "ramp", "input": text, "voice": voice, "response_format": "pcm", "stream_format": framing}
        return "/v1/audio/speech", {**speech, **more}
    return "/v1/chat/completions", {
        "model": "ramp",
        "messages": [{"role": "user", "content": text}],
        "modalities": ["text", "audio"],
        "audio": {"voice": voice, "format": "pcm16"},
        "stream": route == "chat sse",
        **more,
    }


async def _follow(
    client: httpx.AsyncClient, route: Route, text: str, voice: str, faults: dict[str, Any] | None, heard: _Heard
) -> None:
    path, sent = body(route, text, voice, faults)
    async with client.stream("POST", path, json=sent) as response:
        if response.status_code != 200:
            raise _Told(_error(response.status_code, await response.aread()))
        if route == "speech":
            async for piece in response.aiter_raw():
                heard.sound(piece)
        elif route == "chat":
            (choice,) = json.loads(await response.aread())["choices"]
            message = choice["message"]
            heard.text = message["content"] or message["audio"]["transcript"]
            heard.sound(base64.b64decode(message["audio"]["data"]))
        else:
            await _events(response.aiter_lines(), route, heard)


def _error(status: int, content: bytes) -> str:
    try:
        said = json.loads(content)["error"]
    except ValueError:  # Serve's proxy speaks for an ingress replica that died; it knows no OpenAI
        return f"{status} from the proxy: {content[:60]!r}"
    return f"{status} {said['type']}: {said['message']}"


async def _events(lines: AsyncIterator[str], route: Route, heard: _Heard) -> None:
    """Read an event stream to its end, which is ``[DONE]`` or a done event; anything else is a cut."""
    ended = error = False
    async for line in lines:
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            ended = True
            continue
        event = json.loads(line[6:])
        if event.get("error"):
            if error:
                raise RuntimeError("a second error event")
            error = True
            said = event["error"]["message"]
        elif route == "speech sse" and event["type"] == "speech.audio.delta":
            heard.sound(base64.b64decode(event["audio"]))
        elif route == "speech sse":
            ended = ended or event["type"] == "speech.audio.done"
        else:
            for choice in event["choices"]:
                heard.text += choice["delta"].get("content") or ""
                heard.sound(base64.b64decode((choice["delta"].get("audio") or {}).get("data") or ""))
    if error:
        raise _Told(f"event: {said}")
    if not ended:
        raise httpx.RemoteProtocolError("the events have no end")


def some_text(rng: random.Random, words: int) -> str:
    """A text that nobody else has."""
    return " ".join([f"r{rng.getrandbits(40):x}", *(f"w{rng.randrange(100)}" for _ in range(words - 1))])
