"""Sends a workload to one server: warm-up first, then a closed loop or Poisson arrivals."""

import asyncio
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass

import httpx

from omni_ray.bench.answer import Answer
from omni_ray.bench.sound import UnreadableAnswerError
from omni_ray.bench.sse import EventReader
from omni_ray.bench.wire import PATHS, ChatReader, SpeechReader, TranscriptReader, body_of, error_message
from omni_ray.bench.workload import Ask, Asks, Workload, arrival_times
from omni_ray.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Target:
    """A server: ``base_url`` ends in ``/v1``; ``model`` None is the first one it lists; ``api_key`` None sends none."""

    base_url: str
    model: str | None = None
    api_key: str | None = None
    timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Run:
    """What happened.

    Attributes:
        model: the model id that was asked.
        warmup: answers of the warm-up. answers: those that count.
        wall_s: from the first counted request to the last byte.
        client_busy: CPU seconds of this process per second: near 1, the client itself is the limit.
    """

    model: str
    warmup: tuple[Answer, ...]
    answers: tuple[Answer, ...]
    wall_s: float
    client_busy: float


Progress = Callable[[Answer], None]


async def run(workload: Workload, target: Target, progress: Progress) -> Run:
    """Send everything and wait for the last answer.

    Raises:
        ConfigError: the server lists no model, or the clip cannot be read.
    """
    asks = Asks(workload)
    headers = {} if target.api_key is None else {"Authorization": f"Bearer {target.api_key}"}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    timeout = httpx.Timeout(target.timeout_s, connect=30)
    base = target.base_url.rstrip("/")
    async with httpx.AsyncClient(base_url=base, headers=headers, limits=limits, timeout=timeout) as client:
        model = target.model or await _first_model(client)
        sender = _Sender(client, workload, model)
        warm = [asks.ask(n, warm_up=True) for n in range(workload.warmup)]
        warmup = await _closed_loop(sender, warm, workload.concurrency or 1, progress)
        counted = [asks.ask(n) for n in range(workload.requests)]  # made before the clock starts
        sender.started = time.monotonic()
        busy = _cpu_seconds()
        if workload.concurrency is not None:
            answers = await _closed_loop(sender, counted, workload.concurrency, progress)
        else:
            answers = await _poisson(sender, counted, arrival_times(workload), progress)
        busy = _cpu_seconds() - busy
    wall = max(answer.ended for answer in answers)
    return Run(model, tuple(warmup), tuple(answers), wall, busy / max(wall, 1e-9))


async def _first_model(client: httpx.AsyncClient) -> str:
    try:
        response = await client.get("/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ConfigError([f"{client.base_url}models lists no model ({error}); name one with --model"]) from error


async def _closed_loop(sender: "_Sender", asks: list[Ask], clients: int, progress: Progress) -> list[Answer]:
    waiting = iter(asks)
    answers: list[Answer] = []

    async def one_client() -> None:
        for ask in waiting:
            answers.append(await sender.send(ask))
            progress(answers[-1])

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(clients, len(asks))):
            tasks.create_task(one_client())
    return sorted(answers, key=lambda answer: answer.index)


async def _poisson(sender: "_Sender", asks: list[Ask], times: list[float], progress: Progress) -> list[Answer]:
    async def one_request(ask: Ask, due: float) -> Answer:
        await asyncio.sleep(sender.started + due - time.monotonic())
        answer = await sender.send(ask, due)
        progress(answer)
        return answer

    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(one_request(ask, due)) for ask, due in zip(asks, times, strict=True)]
    return [task.result() for task in running]


class _Sender:
    """Sends one request and reads its answer to the end."""

    def __init__(self, client: httpx.AsyncClient, workload: Workload, model: str) -> None:
        self._client = client
        self._workload = workload
        self._model = model
        self.started = time.monotonic()

    def _now(self) -> float:
        return time.monotonic() - self.started

    async def send(self, ask: Ask, due: float | None = None) -> Answer:
        """The answer, or why there is none."""
        body = body_of(self._workload, ask, self._model)
        files = None if body.file is None else {"file": body.file}
        answer = Answer(ask.index, self._now(), input_audio_s=ask.clip.seconds if ask.clip else 0.0)
        if due is not None:
            answer.late = max(0.0, answer.sent - due)
        try:
            async with self._client.stream(
                "POST", PATHS[self._workload.kind], json=body.json, data=body.form or None, files=files
            ) as response:
                await self._read(answer, response)
        except httpx.ConnectError as error:
            answer.fails("connect", str(error))
        except httpx.TimeoutException as error:
            answer.fails("timeout", type(error).__name__)
        except httpx.HTTPError as error:
            answer.fails("cut", str(error) or type(error).__name__)
        except UnreadableAnswerError as error:
            answer.fails("unreadable", error.message)
        answer.ended = self._now()
        self._check(answer)
        return answer

    async def _read(self, answer: Answer, response: httpx.Response) -> None:
        if response.status_code != 200:
            answer.fails(f"http_{response.status_code}", error_message(await response.aread()))
            return
        if self._workload.kind == "speech":
            speech = SpeechReader(answer, dict(response.headers))
            async for piece in response.aiter_bytes():
                speech.piece(piece, self._now())
            return
        reader = ChatReader(answer) if self._workload.kind == "chat" else TranscriptReader(answer)
        if isinstance(reader, TranscriptReader) and "event-stream" not in response.headers.get("content-type", ""):
            reader.whole(await response.aread(), self._now())
            return
        events = EventReader()
        async for piece in response.aiter_bytes():
            now = self._now()
            for data in events.push(piece):
                reader.event(data, now)

    def _check(self, answer: Answer) -> None:
        """An answer that ended well but lacks what was asked for is a failure too."""
        speaks = self._workload.kind == "speech" or (self._workload.kind == "chat" and not self._workload.text_only)
        if speaks and answer.playback.first is None:
            answer.fails("no_audio", "the answer ended without any sound")
        if self._workload.kind != "speech" and answer.first_text is None:
            answer.fails("no_text", "the answer ended without any text")


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def api_key_from(variable: str | None) -> str | None:
    """The key in an environment variable: on a command line everybody on the machine could read it.

    Raises:
        ConfigError: it is empty or not set.
    """
    if variable is None:
        return None
    if key := os.environ.get(variable):
        return key
    raise ConfigError([f"--api-key-env: environment variable {variable!r} is empty or not set"])
