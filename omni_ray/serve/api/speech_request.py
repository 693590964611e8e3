"""The JSON body of ``POST /v1/audio/speech``, and everything its answer needs, decided before any stage is called."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from omni_ray.audio import find_format, open_encoder
from omni_ray.config.pipeline import PipelineConfig
from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.types import Request
from omni_ray.errors import InvalidRequestError
from omni_ray.serve.api.body import OpenAIModel, extras_of, ignored_header, unknown_fields
from omni_ray.serve.api.errors import invalid, shown
from omni_ray.serve.api.priority import SPEECH, WHOLE_SPEECH, priority_of
from omni_ray.serve.api.request_log import RequestInfo
from omni_ray.serve.api.sampling import unread_sampling
from omni_ray.serve.api.service import MAX_PRIORITY, MAX_SEED, Service, is_blank
from omni_ray.serve.api.voices import resolve_voice
from omni_ray.serve.planner import Plan

SAMPLE_RATES_HZ = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
_MAX_INSTRUCTIONS = 4096
_LANGUAGE = re.compile(r"[A-Za-z]{2,3}")


class SpeechBody(OpenAIModel):
    """OpenAI's fields and ours: ``stream``, ``sample_rate``, ``seed``, ``language``, ``priority``, and how is sampled.

    Sampling stands in ``extra_params``, as vLLM-Omni has it, or beside the other fields, as in a chat.
    """

    model: str
    input: str
    voice: Any = None
    response_format: Any = Field(default=None, description="mp3 (default), opus, flac, wav or pcm")
    speed: float | None = Field(default=None, ge=0.25, le=4)
    stream_format: Any = Field(default=None, description='"audio" (default): raw bytes; "sse": server-sent events')
    stream: bool | None = Field(default=None, description="true alone means events; false: the whole file at once")
    sample_rate: int | None = None
    instructions: str | None = Field(default=None, max_length=_MAX_INSTRUCTIONS)
    language: str | None = None
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    extra_params: SamplingParams | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    priority: int | None = Field(
        default=None,
        ge=0,
        le=MAX_PRIORITY,
        description="whose turn is first: smaller numbers. At least 1 for streamed speech and 2 for whole files",
    )


class Delivery(Enum):
    """How the sound leaves."""

    WHOLE = "whole"
    RAW = "raw"
    SSE = "sse"


@dataclass(frozen=True, slots=True)
class SpeechCall:
    """A speech request that can be answered. ``sample_rate`` None is the model's own; ``ignored`` is a header."""

    request: Request
    delivery: Delivery
    format: str
    content_type: str
    sample_rate: int | None
    ignored: Mapping[str, str]


def read_speech(
    service: Service, body: SpeechBody, plan: Plan, info: RequestInfo, extras: Mapping[str, type[BaseModel]]
) -> SpeechCall:
    """Validates ``body``; raises ``InvalidRequestError`` naming the field, or ``NotFoundError`` for the model."""
    dispatcher = service.dispatcher
    service.check_model(body.model)
    limit = min(dispatcher.config.max_speech_chars, dispatcher.config.max_request_text_chars)
    if len(body.input) > limit:
        raise InvalidRequestError(f"input: has {len(body.input)} characters, more than the {limit} allowed", "input")
    if is_blank(body.input):
        raise InvalidRequestError("input: holds nothing to say", "input")
    speed = 1.0 if body.speed is None else body.speed
    slowest, fastest = dispatcher.pipeline.speech_speed
    if not slowest <= speed <= fastest:
        raise InvalidRequestError(f"speed: this model speaks at {slowest:g} to {fastest:g}", "speed")
    voice = None
    if "voice" in body.model_fields_set:
        voice = resolve_voice(dispatcher.pipeline.voices, body.voice, "voice")
    wanted = "mp3" if body.response_format is None else body.response_format
    delivery = _delivery(body, wanted)
    format = find_format(wanted, streamed=False, param="response_format")
    if body.sample_rate is not None:
        _check_rate(body.sample_rate, format.name, delivery)
    sampling, name_of = _sampling(body)
    unread = unread_sampling(dispatcher.pipeline, plan, sampling, name_of)
    priority = priority_of(body.priority, WHOLE_SPEECH if delivery is Delivery.WHOLE else SPEECH)
    return SpeechCall(
        request=service.new_request(
            info,
            seed=body.seed,
            priority=priority,
            extras=extras_of(body, extras),
            sampling=sampling,
            speech_text=body.input,
            voice=voice,
            speed=speed,
            language=read_language(body.language, dispatcher.pipeline),
        ),
        delivery=delivery,
        format=format.name,
        content_type=format.content_type,
        sample_rate=body.sample_rate,
        ignored=ignored_header([*unknown_fields(body), *_known_but_ignored(body, priority), *unread]),
    )


def read_language(language: str | None, pipeline: PipelineConfig) -> str | None:
    """A lower-case ISO 639 code that the pipeline knows; empty is none."""
    if not language:
        return None
    if not _LANGUAGE.fullmatch(language):
        raise InvalidRequestError("language: must be an ISO 639-1 code, such as en", "language")
    language = language.lower()
    if pipeline.languages and language not in pipeline.languages:
        listed = ", ".join(pipeline.languages)
        raise InvalidRequestError(f"language: this model does not know {language}; it knows: {listed}", "language")
    return language


def _delivery(body: SpeechBody, format: Any) -> Delivery:
    """``stream_format`` decides; ``stream: true`` alone is SSE (contract choice 1)."""
    asked = body.stream_format
    if asked is not None and asked not in ("audio", "sse"):
        raise InvalidRequestError(f"stream_format: {shown(asked)} is unknown; one of: audio, sse", "stream_format")
    if asked == "sse" and body.stream is False:
        raise InvalidRequestError("stream: false contradicts stream_format sse", "stream")
    if asked == "sse" or (asked is None and body.stream):
        find_format(format, streamed=True, param="response_format")
        return Delivery.SSE
    found = find_format(format, streamed=body.stream is True, param="response_format")
    return Delivery.RAW if found.streamable and body.stream is not False else Delivery.WHOLE


def _check_rate(rate: int, format: str, delivery: Delivery) -> None:
    if rate not in SAMPLE_RATES_HZ:
        listed = ", ".join(map(str, SAMPLE_RATES_HZ))
        raise InvalidRequestError(f"sample_rate: {rate} is not supported; one of: {listed}", "sample_rate")
    try:
        open_encoder(format, sample_rate=rate, channels=1, streamed=delivery is not Delivery.WHOLE).close()
    except InvalidRequestError as error:
        raise InvalidRequestError(f"sample_rate: {error.message}", "sample_rate") from error


def _sampling(body: SpeechBody) -> tuple[SamplingParams, Callable[[str], str]]:
    """What is said of sampling in either place, and the client's name for a field of it."""
    try:
        given = SamplingParams(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            repetition_penalty=body.repetition_penalty,
            max_tokens=body.max_new_tokens,
        )
    except ValidationError as error:
        wrong = invalid(error)
        if wrong.param != "max_tokens":
            raise wrong from error
        raise InvalidRequestError(f"max_new_{wrong.message[4:]}", "max_new_tokens") from error
    inside = body.extra_params or SamplingParams()
    beside, within = given.model_dump(exclude_none=True), inside.model_dump(exclude_none=True)
    names = {name: "max_new_tokens" if name == "max_tokens" else name for name in beside}
    for name, param in names.items():
        if within.get(name, beside[name]) != beside[name]:
            raise InvalidRequestError(f"{param}: differs from extra_params.{name}", param)
    return given.over(inside), lambda name: names.get(name, f"extra_params.{name}")


def _known_but_ignored(body: SpeechBody, priority: int) -> Iterator[str]:
    if body.instructions:
        yield "instructions"
    if body.priority is not None and body.priority < priority:
        yield "priority"
