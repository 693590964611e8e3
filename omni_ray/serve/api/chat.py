"""``POST /v1/chat/completions``."""

import contextlib
import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from omni_ray.engine.types import Clip
from omni_ray.serve.api import sse
from omni_ray.serve.api.body import read_json, with_extras
from omni_ray.serve.api.chat_chunks import ChatShapes
from omni_ray.serve.api.chat_models import chat_body
from omni_ray.serve.api.chat_request import ChatCall, chat_route_exists, read_chat
from omni_ray.serve.api.deltas import deltas_of
from omni_ray.serve.api.live import Answer, Head, LiveResponse, failed, opened
from omni_ray.serve.api.media import decode_clips
from omni_ray.serve.api.priority import CHAT
from omni_ray.serve.api.request_log import RequestInfo, info_of
from omni_ray.serve.api.schema import answers, json_body
from omni_ray.serve.api.service import Service
from omni_ray.serve.api.sound import Sound

_PCM_RATE_HZ = 24_000  # OpenAI's pcm16 is 24 kHz mono, and a chat chunk has no field that could say otherwise


def chat_routes(service: Service) -> APIRouter:
    """The route, with the model's extra fields in its body."""
    router = APIRouter()
    model = with_extras(chat_body(service.dispatcher.config.max_messages), service.dispatcher.extras)

    @router.post(
        "/chat/completions",
        openapi_extra=json_body(model, service.dispatcher.model_name),
        response_class=Response,
        responses=answers("application/json", "text/event-stream"),
    )
    async def create_chat_completion(request: Request) -> Response:
        """Text and speech from a chat; streamed as server-sent events."""
        chat_route_exists(service)
        info = info_of(request)
        service.admit(info, CHAT)
        with service.bodies.receive(request) as body:
            call, encoded = await read_json(body, model, lambda parsed: read_chat(service, parsed, info))
            clips = await decode_clips(service, body, encoded, call.audio_in_video)
        return LiveResponse(_answer(service, call, clips, info), info, service.dispatcher.config)

    return router


async def _answer(service: Service, call: ChatCall, clips: tuple[Clip, ...], info: RequestInfo) -> Answer:
    dispatcher = service.dispatcher
    shapes = ChatShapes(call, dispatcher.model_name, int(time.time()))
    pcm = call.format == "pcm"
    async with contextlib.AsyncExitStack() as stack:
        sound = None
        if "audio" in call.modalities:
            sound = Sound(
                call.format,
                streamed=call.stream,
                sample_rate=_PCM_RATE_HZ if pcm else None,
                mono=pcm,
                max_bytes=service.max_answer_bytes,
                info=info,
            )
            stack.enter_context(contextlib.closing(sound))
        events = await stack.enter_async_context(opened(service.stream(call.request, call.plan, info, clips)))
        deltas = await stack.enter_async_context(contextlib.aclosing(deltas_of(events, call.plan, sound)))
        if not call.stream:
            whole = sse.json_bytes(await shapes.whole(deltas))
            yield Head("application/json", {"Content-Length": str(len(whole)), **call.ignored})
            yield whole
            return
        yield Head(sse.CONTENT_TYPE, {**sse.HEADERS, **call.ignored}, heartbeat=True)
        yield shapes.first()
        try:
            async for delta in deltas:
                for piece in shapes.pieces(delta):
                    yield piece
        except Exception as error:
            yield failed("chat", error, info)
        else:
            yield sse.DONE
