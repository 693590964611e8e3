"""``POST /v1/audio/speech`` and ``GET /v1/audio/voices``."""

import base64
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from omni_ray.audio import FORMATS
from omni_ray.errors import NotFoundError, TruncatedError
from omni_ray.serve.api import sse
from omni_ray.serve.api.body import read_json, with_extras
from omni_ray.serve.api.deltas import AudioDelta, Delta, Ended, deltas_of
from omni_ray.serve.api.live import Answer, Head, LiveResponse, failed, opened
from omni_ray.serve.api.priority import SPEECH
from omni_ray.serve.api.request_log import RequestInfo, info_of
from omni_ray.serve.api.schema import answers, json_body
from omni_ray.serve.api.service import Service
from omni_ray.serve.api.sound import Sound
from omni_ray.serve.api.speech_request import Delivery, SpeechBody, SpeechCall, read_speech
from omni_ray.serve.api.usage import speech_usage
from omni_ray.serve.api.voices import voices_body
from omni_ray.serve.planner import Plan


def speech_routes(service: Service) -> APIRouter:
    """The routes, with the model's extra fields in the speech body."""
    router = APIRouter()
    extras = service.dispatcher.extras
    model = with_extras(SpeechBody, extras)

    @router.post(
        "/audio/speech",
        openapi_extra=json_body(model, service.dispatcher.model_name),
        response_class=Response,
        responses=answers(*(format.content_type for format in FORMATS.values()), "text/event-stream"),
    )
    async def create_speech(request: Request) -> Response:
        """Speech from text: raw bytes as they are made, server-sent events, or one whole file.

        Speech that had to be cut at its limit: events say ``truncated``, a whole file has the header
        ``x-omni-ray-truncated``, and raw bytes break off like a failure, without the terminating chunk.
        """
        plan = service.route_plan("audio", "speech_text")
        info = info_of(request)
        service.admit(info, SPEECH)
        with service.bodies.receive(request) as body:
            call = await read_json(body, model, lambda parsed: read_speech(service, parsed, plan, info, extras))
        return LiveResponse(_answer(service, call, plan, info), info, service.dispatcher.config)

    @router.get("/audio/voices", response_description="the answer")
    async def list_voices() -> dict[str, Any]:
        """The voices of the served model."""
        if "audio" not in service.dispatcher.pipeline.output_kinds():
            raise NotFoundError(f"this model has no such route: {service.dispatcher.model_name} makes no audio")
        return voices_body(service.dispatcher.pipeline.voices)

    return router


async def _answer(service: Service, call: SpeechCall, plan: Plan, info: RequestInfo) -> Answer:
    streamed = call.delivery is not Delivery.WHOLE
    stream = service.stream(call.request, plan, info)
    async with contextlib.AsyncExitStack() as stack:
        sound = Sound(
            call.format,
            streamed=streamed,
            sample_rate=call.sample_rate,
            mono=False,
            max_bytes=service.max_answer_bytes,
            info=info,
        )
        stack.enter_context(contextlib.closing(sound))
        events = await stack.enter_async_context(opened(stream))
        deltas = await stack.enter_async_context(contextlib.aclosing(deltas_of(events, plan, sound)))
        if call.delivery is Delivery.WHOLE:
            whole, end = await _collect(deltas)
            headers = {"Content-Length": str(len(whole)), **_sound_headers(sound), **call.ignored}
            if end.reason == "length":
                headers["x-omni-ray-truncated"] = "true"
            yield Head(call.content_type, headers)
            yield whole
            return
        first = await anext(deltas)  # the sample rate is known with the first sound, and only then
        headers = {**sse.HEADERS, **_sound_headers(sound), **call.ignored}
        if call.delivery is Delivery.RAW:
            yield Head(call.content_type, headers)
            for piece in _raw(first):
                yield piece
            reason = None
            async for delta in deltas:
                for piece in _raw(delta):
                    yield piece
                reason = delta.reason if isinstance(delta, Ended) else None
            if reason == "length":  # the status was 200 and the text is not all there (C31)
                raise TruncatedError("the speech reached its limit before its end")
            return
        yield Head(sse.CONTENT_TYPE, headers, heartbeat=True)
        yield _event(first)
        try:
            async for delta in deltas:
                yield _event(delta)
        except Exception as error:
            yield failed("speech", error, info)


async def _collect(deltas: AsyncIterator[Delta]) -> tuple[bytes, Ended]:
    pieces: list[bytes] = []
    end: Ended | None = None
    async for delta in deltas:
        if isinstance(delta, AudioDelta):
            pieces.append(delta.data)
        elif isinstance(delta, Ended):
            end = delta
    assert end is not None
    return b"".join(pieces), end


def _raw(delta: Delta) -> list[bytes]:
    return [delta.data] if isinstance(delta, AudioDelta) else []


def _event(delta: Delta) -> bytes:
    if isinstance(delta, AudioDelta):
        return sse.event({"type": "speech.audio.delta", "audio": base64.b64encode(delta.data).decode()})
    assert isinstance(delta, Ended)
    truncated = {"truncated": True} if delta.reason == "length" else {}
    return sse.event({"type": "speech.audio.done", "usage": speech_usage(delta.usage), **truncated})


def _sound_headers(sound: Sound) -> Mapping[str, str]:
    return {"X-Sample-Rate": str(sound.sample_rate), "X-Channels": str(sound.channels), "X-Bit-Depth": "16"}
