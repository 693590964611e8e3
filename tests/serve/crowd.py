"""Clients of ``ramp`` that differ in all they can: text, voice, seed, route, format. Each knows its own answer."""

import asyncio
import base64
import io
import itertools
import json
import math
import random
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import httpx
import numpy as np
import soundfile

from omni_ray.audio import open_encoder
from omni_ray.models.ramp import oracle

CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"
Framing = Literal["whole", "raw", "events"]
Way = tuple[str, str, Framing]

WAYS: list[Way] = [
    (SPEECH, "pcm", "raw"), (SPEECH, "wav", "raw"), (SPEECH, "mp3", "raw"), (SPEECH, "opus", "raw"),
    (SPEECH, "pcm", "events"), (SPEECH, "mp3", "events"), (SPEECH, "flac", "whole"), (SPEECH, "wav", "whole"),
    (CHAT, "pcm", "events"), (CHAT, "wav", "events"), (CHAT, "mp3", "events"), (CHAT, "opus", "events"),
    (CHAT, "pcm", "whole"), (CHAT, "flac", "whole"), (CHAT, "wav", "whole"), (CHAT, "none", "events"),
]  # fmt: skip
"""``none`` is a chat that asks for text alone."""


@dataclass(frozen=True)
class Client:
    """One client. ``voice`` None leaves it out, which is voice a; with a ``seed`` the sound depends on it."""

    text: str
    voice: str | None
    seed: int | None
    way: Way

    @cached_property
    def pcm(self) -> bytes:
        """The oracle's samples."""
        return oracle.pcm(self.text, f"{self.voice or 'a'}{'' if self.seed is None else self.seed}")

    @cached_property
    def expected(self) -> bytes:
        """The bytes of its sound, in its format."""
        _, format, framing = self.way
        if format == "none":
            return b""
        encoder = open_encoder(format, sample_rate=24_000, channels=1, streamed=framing != "whole")
        samples = np.frombuffer(self.pcm, "<i2").astype(np.float32) / np.float32(32_767)
        return encoder.write(samples) + encoder.finish()

    def request(self, **ramp: Any) -> dict[str, Any]:
        """The JSON body; ``ramp`` are fault knobs."""
        route, format, framing = self.way
        more: dict[str, Any] = {"ramp": {**ramp, "noise": self.seed is not None}}
        if self.seed is not None:
            more["seed"] = self.seed
        voice = {} if self.voice is None else {"voice": self.voice}
        if route == SPEECH:
            how = (
                {"stream": False}
                if framing == "whole"
                else {"stream_format": "sse" if framing == "events" else "audio"}
            )
            return {"model": "ramp", "input": self.text, "response_format": format, **voice, **how, **more}
        return {
            "model": "ramp",
            "messages": [{"role": "user", "content": self.text}],
            "modalities": ["text"] if format == "none" else ["text", "audio"],
            "audio": None if format == "none" else {**voice, "format": format},
            "stream": framing == "events",
            **more,
        }

    def check(self, response: httpx.Response, others: "list[Client]") -> None:
        """Every byte of the answer is this client's own."""
        assert response.status_code == 200, response.text
        route, _, framing = self.way
        if route == SPEECH:
            sound = speech_events(response.text) if framing == "events" else response.content
        else:
            sound, text = heard(parse_sse(response.text)) if framing == "events" else chat_body(response.json())
            assert text == self.text
        if same(sound, self.expected):
            return
        guilty = [k for k, other in enumerate(others) if same(sound, other.expected)]
        raise AssertionError(
            f"{self}: {len(sound)} bytes are not the oracle's {len(self.expected)}; whole answer of clients {guilty}, "
            f"first wrong sample of clients {whose(sound, self, others)}"
        )


def make_clients(count: int, rng: random.Random) -> list[Client]:
    """Clients in all ways. A third say the same thing, so that only voice and seed tell them apart (C02, C03)."""
    clients = []
    for k, way in zip(range(count), itertools.cycle(WAYS)):
        text = "we all say this at once" if k % 3 == 0 else " ".join([f"request {k}", *["word"] * rng.randint(1, 20)])
        voice = None if k % 8 == 5 else "abcdefgh"[k % 8]
        clients.append(Client(text, voice, rng.choice((None, 7, k, 2**63 - 1)), way))
    return clients


def same(sound: bytes, expected: bytes) -> bool:
    """Whether the bytes are equal; of Ogg, whose serial number is drawn at random, whether the samples are."""
    if sound[:4] == expected[:4] == b"OggS":
        (mine, rate), (wanted, wanted_rate) = (
            soundfile.read(io.BytesIO(data), dtype="float32") for data in (sound, expected)
        )
        return rate == wanted_rate and np.array_equal(mine, wanted)
    return sound == expected


def whose(sound: bytes, client: Client, others: list[Client]) -> list[int]:
    """Of plain samples that are not ``client``'s: who would have said the first wrong one at its place."""
    if client.way[1] != "pcm":
        return []
    first = next((i for i in range(0, len(sound), 2) if sound[i : i + 2] != client.pcm[i : i + 2]), len(sound))
    return [
        k
        for k, other in enumerate(others)
        if first < len(sound) and other.pcm[first : first + 2] == sound[first : first + 2]
    ]


def parse_sse(body: str) -> list[dict[str, Any]]:
    """The JSON objects of an OpenAI stream; it ends with exactly one ``[DONE]``."""
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line.startswith("data: ")]
    assert lines.count("[DONE]") == 1
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def heard(chunks: list[dict[str, Any]]) -> tuple[bytes, str]:
    """Sound and text of a chat stream."""
    sound, text = b"", ""
    for chunk in chunks:
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            delta = choice["delta"]
            text += delta.get("content") or ""
            sound += base64.b64decode((delta.get("audio") or {}).get("data") or "")
    return sound, text


def speech_events(body: str) -> bytes:
    """Sound of a speech stream, which has one end."""
    *deltas, end = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: ")]
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    assert end["type"] == "speech.audio.done"
    return b"".join(base64.b64decode(event["audio"]) for event in deltas)


def chat_body(body: dict[str, Any]) -> tuple[bytes, str]:
    """Sound and text of a chat that came whole."""
    (choice,) = body["choices"]
    return base64.b64decode(choice["message"]["audio"]["data"]), choice["message"]["content"]


class Hearing:
    """A streamed request, asked in the background, and what has come of its answer so far.

    Attributes:
        body: what has come. answer: the task that yields the whole of it as text, or raises what cut it.
        silence_s: the longest time between two pieces of it.
    """

    def __init__(self, client: httpx.AsyncClient, path: str, request: dict[str, Any]) -> None:
        self.body = bytearray()
        self.silence_s = 0.0
        self.answer = asyncio.create_task(self._listen(client, path, request))

    async def _listen(self, client: httpx.AsyncClient, path: str, request: dict[str, Any]) -> str:
        async with client.stream("POST", path, json=request) as response:
            last = math.inf
            async for piece in response.aiter_raw():
                self.body += piece
                self.silence_s = max(self.silence_s, time.monotonic() - last)
                last = time.monotonic()
            assert response.status_code == 200, self.body
        return self.body.decode()

    def speaks(self) -> bool:
        """Whether sound has come in an event; fails if the answer has ended without any."""
        sounds = b'"data":"' in self.body or b"speech.audio.delta" in self.body
        assert sounds or not self.answer.done(), self.body
        return sounds
