"""``POST /v1/audio/transcriptions``."""

import contextlib

from fastapi import APIRouter, Request
from starlette.responses import Response

from omni_ray.engine.types import AudioClip
from omni_ray.serve.api import sse
from omni_ray.serve.api.deltas import Ended, SegmentDelta, deltas_of
from omni_ray.serve.api.live import Answer, Head, LiveResponse, failed, opened
from omni_ray.serve.api.media import decode_clips
from omni_ray.serve.api.priority import SPEECH
from omni_ray.serve.api.request_log import RequestInfo, info_of
from omni_ray.serve.api.schema import answers, form_body
from omni_ray.serve.api.service import Service
from omni_ray.serve.api.transcript import Transcript
from omni_ray.serve.api.transcription_request import TranscriptionCall, TranscriptionForm, read_transcription
from omni_ray.serve.planner import Plan


def transcription_routes(service: Service) -> APIRouter:
    """The route."""
    router = APIRouter()

    @router.post(
        "/audio/transcriptions",
        openapi_extra=form_body(TranscriptionForm, service.dispatcher.model_name),
        response_class=Response,
        responses=answers("application/json", "text/plain", "application/x-subrip", "text/vtt", "text/event-stream"),
    )
    async def create_transcription(request: Request) -> Response:
        """Text from an uploaded audio file."""
        plan = service.route_plan("transcript", "input_audio")
        info = info_of(request)
        service.admit(info, SPEECH)
        with service.bodies.receive(request) as body:
            call, encoded = await read_transcription(service, body, plan, info)
            [clip] = await decode_clips(service, body, [encoded])
            assert isinstance(clip, AudioClip)
        return LiveResponse(_answer(service, call, clip, plan, info), info, service.dispatcher.config)

    return router


async def _answer(service: Service, call: TranscriptionCall, clip: AudioClip, plan: Plan, info: RequestInfo) -> Answer:
    transcript = Transcript(
        duration_s=len(clip.samples) / clip.sample_rate,
        language=call.request.language,
        temperature=call.request.sampling.temperature or 0.0,
    )
    async with (
        opened(service.stream(call.request, plan, info, (clip,))) as events,
        contextlib.aclosing(deltas_of(events, plan, None)) as deltas,
    ):
        if not call.stream:
            async for delta in deltas:
                if isinstance(delta, SegmentDelta):
                    transcript.add(delta.segment)
            content_type, whole = transcript.whole(call.response_format)
            yield Head(content_type, {"Content-Length": str(len(whole)), **call.ignored})
            yield whole
            return
        yield Head(sse.CONTENT_TYPE, {**sse.HEADERS, **call.ignored}, heartbeat=True)
        try:
            async for delta in deltas:
                if isinstance(delta, SegmentDelta):
                    yield transcript.delta_event(delta.segment)
                elif isinstance(delta, Ended):
                    yield transcript.done_event(delta.usage)
        except Exception as error:
            yield failed("transcription", error, info)
