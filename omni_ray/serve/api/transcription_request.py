"""The form of ``POST /v1/audio/transcriptions``: the upload is kept in memory under a cap, fields are checked."""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser

from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.types import Request
from omni_ray.errors import InvalidRequestError, PayloadTooLargeError
from omni_ray.serve.api.body import ignored_header
from omni_ray.serve.api.errors import invalid, shown
from omni_ray.serve.api.incoming import MB, Body
from omni_ray.serve.api.media import EncodedClip
from omni_ray.serve.api.priority import SPEECH
from omni_ray.serve.api.request_log import RequestInfo
from omni_ray.serve.api.sampling import unread_sampling
from omni_ray.serve.api.service import Service
from omni_ray.serve.api.speech_request import read_language
from omni_ray.serve.planner import Plan

ResponseFormat = Literal["json", "text", "verbose_json", "srt", "vtt"]


class TranscriptionForm(BaseModel):
    """Form fields are text, so numbers and booleans are read from words."""

    model_config = ConfigDict(extra="ignore", allow_inf_nan=False, protected_namespaces=())

    model: str
    language: str | None = None
    response_format: ResponseFormat = Field(default="json", description="json or text if streamed")
    temperature: float | None = Field(default=None, ge=0, le=1)
    stream: bool = False


@dataclass(frozen=True, slots=True)
class TranscriptionCall:
    """A transcription request that can be answered. ``ignored`` is a header."""

    request: Request
    response_format: ResponseFormat
    stream: bool
    ignored: Mapping[str, str]


class _MemoryParser(MultiPartParser):
    """Never writes an upload to disk; the body's own limit bounds the memory."""

    spool_max_size = 2**40


async def read_transcription(
    service: Service, body: Body, plan: Plan, info: RequestInfo
) -> tuple[TranscriptionCall, EncodedClip]:
    """Reads and validates the form, all but the clip's bytes; raises ``InvalidRequestError`` naming the field."""
    form = await _read_form(body)
    try:
        return await _read_fields(service, form, plan, info)
    finally:
        await form.close()


async def _read_form(body: Body) -> FormData:
    if body.content_type != "multipart/form-data":
        raise InvalidRequestError(
            f"the content type {shown(body.content_type)} is not supported; send multipart/form-data"
        )
    _, options = parse_options_header(body.headers["content-type"])
    if (charset := options.get(b"charset", b"utf-8").lower()) not in (b"utf-8", b"utf8"):
        # Python knows codecs that are no text encoding, or raise whatever they like
        raise InvalidRequestError(f"the form's charset {shown(charset.decode('latin-1'))} is not supported; send utf-8")
    async with contextlib.aclosing(body.pieces()) as pieces:
        try:
            return await _MemoryParser(body.headers, pieces, max_files=4, max_fields=64).parse()
        except (MultiPartException, KeyError, UnicodeDecodeError) as error:
            words = error.message if isinstance(error, MultiPartException) else "its headers are incomplete"
            raise InvalidRequestError(f"the form cannot be read: {words}") from error


async def _read_fields(
    service: Service, form: FormData, plan: Plan, info: RequestInfo
) -> tuple[TranscriptionCall, EncodedClip]:
    fields: dict[str, Any] = {name: value for name, value in form.items() if isinstance(value, str)}
    try:
        read = TranscriptionForm.model_validate(fields)
    except ValidationError as error:
        raise invalid(error) from error
    service.check_model(read.model)
    _refuse_what_cannot_be_honoured(form, read)
    file = form.get("file")
    if not isinstance(file, UploadFile):
        raise InvalidRequestError("file: an uploaded audio file is required", "file")
    max_mb = service.dispatcher.config.max_audio_mb
    if (file.size or 0) > max_mb * MB:
        raise PayloadTooLargeError(f"file: exceeds the limit of {max_mb:g} MB", "file")
    pipeline = service.dispatcher.pipeline
    sampling = SamplingParams(temperature=read.temperature)
    unread = unread_sampling(pipeline, plan, sampling, lambda name: name)
    call = TranscriptionCall(
        request=service.new_request(
            info,
            seed=None,
            priority=SPEECH,
            extras={},
            sampling=sampling,
            language=read_language(read.language, pipeline),
        ),
        response_format=read.response_format,
        stream=read.stream,
        ignored=ignored_header([*_ignored(form), *unread]),
    )
    return call, EncodedClip("file", await file.read())


def _refuse_what_cannot_be_honoured(form: FormData, read: TranscriptionForm) -> None:
    words = [*form.getlist("timestamp_granularities[]"), *form.getlist("timestamp_granularities")]
    if any(word != "segment" for word in words):
        raise InvalidRequestError("timestamp_granularities: only segment can be honoured", "timestamp_granularities")
    if form.getlist("include[]") or form.getlist("include"):
        raise InvalidRequestError("include: cannot be honoured by this server; leave it out", "include")
    if read.stream and read.response_format not in ("json", "text"):
        raise InvalidRequestError(
            f"response_format: {read.response_format} cannot be streamed; one of: json, text", "response_format"
        )


def _ignored(form: FormData) -> Iterator[str]:
    known = {"file", "timestamp_granularities[]", "timestamp_granularities", *TranscriptionForm.model_fields}
    return (name.removesuffix("[]") for name in form if name not in known)
