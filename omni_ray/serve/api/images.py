"""``POST /v1/images/generations``."""

import base64
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from omni_ray.image import ImageFormat
from omni_ray.serve.api import sse
from omni_ray.serve.api.body import read_json, with_extras
from omni_ray.serve.api.deltas import Delta, Ended, PictureDelta, StepDelta, deltas_of
from omni_ray.serve.api.images_request import ImagesBody, ImagesCall, read_images
from omni_ray.serve.api.live import Answer, Head, LiveResponse, failed, opened
from omni_ray.serve.api.pictures import Picture, Pictures
from omni_ray.serve.api.priority import SPEECH
from omni_ray.serve.api.request_log import RequestInfo, info_of
from omni_ray.serve.api.schema import answers, json_body
from omni_ray.serve.api.service import Service
from omni_ray.serve.api.usage import UsageTotals, image_usage
from omni_ray.serve.planner import Plan


def image_routes(service: Service) -> APIRouter:
    """The route, with the model's extra fields in its body."""
    router = APIRouter()
    extras = service.dispatcher.extras
    model = with_extras(ImagesBody, extras)

    @router.post(
        "/images/generations",
        openapi_extra=json_body(model, service.dispatcher.model_name),
        response_class=Response,
        responses=answers("application/json", "text/event-stream"),
    )
    async def create_image(request: Request) -> Response:
        """Pictures from a text, in base64; streamed: how one looks on its way, and at the end."""
        plan = service.route_plan("image", "image_prompt")
        info = info_of(request)
        service.admit(info, SPEECH)
        with service.bodies.receive(request) as body:
            call = await read_json(body, model, lambda parsed: read_images(service, parsed, info, extras))
        return LiveResponse(_answer(service, call, plan, info), info, service.dispatcher.config)

    return router


async def _answer(service: Service, call: ImagesCall, plan: Plan, info: RequestInfo) -> Answer:
    created = int(time.time())
    pictures = Pictures(call.format, call.quality, service.max_answer_bytes)
    async with (
        opened(service.stream(call.request, plan, info)) as events,
        contextlib.aclosing(deltas_of(events, plan, None, pictures)) as deltas,
    ):
        if not call.stream:
            whole = sse.json_bytes(await _whole(deltas, call.format, created))
            yield Head("application/json", {"Content-Length": str(len(whole)), **call.ignored})
            yield whole
            return
        yield Head(sse.CONTENT_TYPE, {**sse.HEADERS, **call.ignored}, heartbeat=True)
        try:
            async for piece in _streamed(deltas, call.format, created):
                yield piece
        except Exception as error:
            yield failed("images", error, info)


async def _whole(deltas: AsyncIterator[Delta], format: ImageFormat, created: int) -> dict[str, Any]:
    made: list[Picture] = []
    usage = UsageTotals()
    async for delta in deltas:
        if isinstance(delta, PictureDelta):
            made.append(delta.picture)
        elif isinstance(delta, Ended):
            usage = delta.usage
    return {
        "created": created,
        "data": [{"b64_json": base64.b64encode(picture.data).decode()} for picture in made],
        "background": "opaque",
        "output_format": format,
        "size": _size(made[-1]),
        "usage": image_usage(usage),
    }


async def _streamed(deltas: AsyncIterator[Delta], format: ImageFormat, created: int) -> AsyncIterator[bytes]:
    """Steps as comments, ``partial_image`` events, and ``completed`` once the usage is known."""
    previews = 0
    finished: Picture | None = None
    async for delta in deltas:
        if isinstance(delta, StepDelta):
            yield sse.comment(f"step {delta.step} of {delta.steps}")
        elif isinstance(delta, PictureDelta) and delta.picture.preview:
            fields = _event(delta.picture, format, created)
            yield sse.event({"type": "image_generation.partial_image", **fields, "partial_image_index": previews})
            previews += 1
        elif isinstance(delta, PictureDelta):
            finished = delta.picture
        elif isinstance(delta, Ended):
            assert finished is not None, "the engine paints at least one picture"
            fields = _event(finished, format, created)
            yield sse.event({"type": "image_generation.completed", **fields, "usage": image_usage(delta.usage)})


def _event(picture: Picture, format: ImageFormat, created: int) -> dict[str, Any]:
    return {
        "b64_json": base64.b64encode(picture.data).decode(),
        "background": "opaque",
        "created_at": created,
        "output_format": format,
        "quality": "auto",
        "size": _size(picture),
    }


def _size(picture: Picture) -> str:
    return f"{picture.width}x{picture.height}"
