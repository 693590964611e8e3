"""A scripted ``Dispatcher`` and small pipelines for the tests of the HTTP side; no Ray, no models."""

import asyncio
import base64
import contextlib
import io
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, cast

import httpx
import numpy as np
import soundfile
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from omni_ray.config.base import StrictModel
from omni_ray.config.ingress import IngressConfig
from omni_ray.config.pipeline import (
    Edge,
    OutputKind,
    PipelineConfig,
    RequestPart,
    StageExecutionType,
    StagePipelineConfig,
    Voices,
)
from omni_ray.engine.types import AudioChunk, AudioClip, Finish, Output, Request, TextChunk, TranscriptChunk, Usage
from omni_ray.errors import SaturatedError
from omni_ray.serve.api.app import make_app
from omni_ray.serve.dispatcher import Dispatcher
from omni_ray.serve.events import OutputEvent
from omni_ray.serve.planner import Plan, make_plan
from omni_ray.serve.readiness import Readiness

RATE = 24_000
ZERO_WAV = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAgD4AAAB9AAACABAAZGF0YQAAAAA="
OPENAI_VOICES = (
    "alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse",
)  # fmt: skip


def _stage(name: str, final: OutputKind | None, *inputs: Edge) -> StagePipelineConfig:
    return StagePipelineConfig(
        name=name,
        execution_type=StageExecutionType.LLM_AR,
        model_arch="X",
        final_output_type=final,
        inputs=inputs,
    )


def _from(source: str, *parts: RequestPart) -> Edge:
    return Edge(source=source, processor="x:y", parts=parts)


VOICES = Voices(names=("a", "b"), default="a", aliases=dict.fromkeys(OPENAI_VOICES, "b"))
LISTENER = _stage("listener", "transcript", _from("request", "input_audio"))
FULL = PipelineConfig(
    name="full",
    description="test",
    stages=(
        LISTENER,
        _stage("thinker", "text", _from("request", "messages"), _from("listener", "messages")),
        _stage("talker", "audio", _from("thinker"), _from("request", "speech_text")),
    ),
    voices=VOICES,
    speech_speed=(0.25, 4.0),
    sampled_outputs=("text", "audio", "transcript"),
    max_input_audio_seconds=60,
)
ONE_WAY = FULL.model_copy(update={"sampled_outputs": ("text",), "languages": ("en", "fr")})
"""Its speech and its transcripts are always made the same way, in two languages."""
TEXT_ONLY = PipelineConfig(
    name="text_only", description="test", stages=(_stage("thinker", "text", _from("request", "messages")),)
)
SPEECH_ONLY = PipelineConfig(
    name="speech_only",
    description="test",
    stages=(_stage("talker", "audio", _from("request", "speech_text")),),
    voices=VOICES,
)
PAINTER = PipelineConfig(
    name="painter", description="test", stages=(_stage("painter", "image", _from("request", "image_prompt")),)
)


class Fault(StrictModel):
    """A model extra of the tests."""

    at: int
    note: str | None = None


def ramp(start: int, stop: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Samples whose PCM values count, so that a lost or repeated one shows."""
    return ((np.arange(start, stop) % 20_011 - 10_005) / 32_767).astype(np.float32)


def pcm(start: int, stop: int) -> bytes:
    """The PCM of ``ramp``."""
    return (np.arange(start, stop) % 20_011 - 10_005).astype("<i2").tobytes()


def text(*words: str, prompt: int = 5, reason: Any = "stop") -> list[OutputEvent]:
    """Thinker events."""
    chunks: list[Output] = [TextChunk(i, word, (i,)) for i, word in enumerate(words)]
    return [
        OutputEvent("thinker", output)
        for output in (*chunks, Finish(reason, Usage(prompt_tokens=prompt, completion_tokens=len(words))))
    ]


def audio(
    *sizes: int, rate: int = RATE, channels: int = 1, reason: Any = "stop", scale: float = 1
) -> list[OutputEvent]:
    """Talker events: chunks of ``sizes`` samples, 1 audio token per chunk."""
    events, at = [], 0
    for size in sizes:
        samples = ramp(at, at + size) * np.float32(scale)
        if channels > 1:
            samples = np.stack([samples] * channels, axis=1)
        events.append(OutputEvent("talker", AudioChunk(at, samples, rate)))
        at += size
    return [*events, OutputEvent("talker", Finish(reason, Usage(audio_tokens=len(sizes))))]


def transcript(*texts: str) -> list[OutputEvent]:
    """Listener events, one second per segment."""
    chunks: list[Output] = [TranscriptChunk(i, 0, t, float(i), i + 1.0) for i, t in enumerate(texts)]
    finish = Finish("stop", Usage(prompt_tokens=7, completion_tokens=len(texts)))
    return [OutputEvent("listener", output) for output in (*chunks, finish)]


def wav(samples: Any, rate: int = 16_000, **kwargs: Any) -> bytes:
    """A file in memory."""
    out = io.BytesIO()
    soundfile.write(out, samples, rate, **{"format": "WAV", "subtype": "PCM_16", **kwargs})
    return out.getvalue()


def b64(data: bytes) -> str:
    """Base64 text."""
    return base64.b64encode(data).decode()


Step = OutputEvent | Exception | float
"""An event, an error to raise, or seconds to wait."""


class FakeDispatcher:
    """Plays ``script`` for every request. Counts what is open and records what it was given."""

    def __init__(
        self,
        pipeline: PipelineConfig = FULL,
        script: Sequence[Step] | Callable[[Request], Sequence[Step]] = (),
        *,
        config: IngressConfig | None = None,
        extras: Mapping[str, type[BaseModel]] | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.config = config or IngressConfig()
        self.model_name = "m"
        self.extras = {"fault": Fault} if extras is None else extras
        self.max_audio_seconds = 300.0
        self.max_input_audio_seconds = pipeline.max_input_audio_seconds
        self.script = script
        self.requests: list[Request] = []
        self.clips: list[tuple[AudioClip, ...]] = []
        self.plans: list[Plan] = []
        self.traceparents: list[str | None] = []
        self.waited: list[float] = []
        self.active = 0
        self.open = 0
        self.steps = 0
        self.completed = 0
        self.ready = Readiness(True, {})
        self.ended: list[tuple[str, str]] = []

    def request_ended(self, route: str, outcome: str, seconds: float) -> None:
        self.ended.append((route, outcome))

    def plan(self, outputs: Collection[OutputKind], parts: Collection[RequestPart]) -> Plan:
        return make_plan(self.pipeline, outputs, parts)

    @contextlib.contextmanager
    def admitted(self, kept: int = 0) -> Iterator[None]:
        if self.active >= self.config.max_concurrent_requests - kept:
            raise SaturatedError("full")
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

    async def stream(
        self,
        request: Request,
        plan: Plan,
        clips: Sequence[AudioClip] = (),
        traceparent: str | None = None,
        waited_s: float = 0.0,
    ) -> AsyncGenerator[OutputEvent, None]:
        self.requests.append(request)
        self.waited.append(waited_s)
        self.plans.append(plan)
        self.clips.append(tuple(clips))
        self.traceparents.append(traceparent)
        assert self.active > self.open, "a stream without a place"
        finals = {stage for _, stage in plan.outputs}
        self.open += 1
        try:
            for step in self.script(request) if callable(self.script) else self.script:
                self.steps += 1
                if isinstance(step, Exception):
                    raise step
                if isinstance(step, int | float):
                    await asyncio.sleep(step)
                elif step.stage in finals:
                    yield step
            self.completed += 1
        finally:
            self.open -= 1

    async def readiness(self) -> Readiness:
        return self.ready


def app_of(fake: FakeDispatcher, *keys: str) -> FastAPI:
    """The application over a fake."""
    return make_app(cast(Dispatcher, fake), {f"name of {key}": key for key in keys})


def client_of(fake: FakeDispatcher, *keys: str, **kwargs: Any) -> httpx.AsyncClient:
    """An in-process client; an aborted body raises in the test."""
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app_of(fake, *keys), raise_app_exceptions=True), base_url="http://t", **kwargs
    )


@contextlib.contextmanager
def serving(fake: FakeDispatcher, *keys: str) -> Iterator[str]:
    """A real server on localhost; yields its base URL."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app_of(fake, *keys), log_level="critical", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(5)


def sse_of(body: str) -> list[Any]:
    """The ``data`` of every event: JSON, or the string ``[DONE]``."""
    found: list[Any] = []
    for block in body.split("\n\n"):
        for line in block.split("\n"):
            if line.startswith("data: "):
                found.append(line[6:] if line[6:] == "[DONE]" else json.loads(line[6:]))
    return found


def check_error(response: httpx.Response, status: int, param: str | None = None) -> dict[str, Any]:
    """Asserts OpenAI's error shape; returns the error."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"].startswith("application/json")
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert error["param"] == param, error
    assert error["message"]
    assert "Traceback" not in error["message"]
    return cast(dict[str, Any], error)


async def eventually(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    """Waits until ``condition`` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.005)
