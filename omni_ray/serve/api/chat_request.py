"""From the chat body to everything its answer needs: decided in full before any stage is called."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ValidationError

from omni_ray.audio import find_format
from omni_ray.config.pipeline import OutputKind, RequestPart
from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.types import Request
from omni_ray.errors import InvalidRequestError, NotFoundError
from omni_ray.serve.api.body import extras_of, ignored_header, unknown_fields
from omni_ray.serve.api.chat_messages import read_messages
from omni_ray.serve.api.chat_models import AudioOptions, ChatBody
from omni_ray.serve.api.errors import invalid, shown
from omni_ray.serve.api.media import EncodedClip
from omni_ray.serve.api.priority import CHAT, priority_of
from omni_ray.serve.api.request_log import RequestInfo
from omni_ray.serve.api.sampling import unread_sampling
from omni_ray.serve.api.service import Service
from omni_ray.serve.api.voices import resolve_voice
from omni_ray.serve.planner import Plan

Modality = Literal["text", "audio"]
_MODALITIES: tuple[Modality, ...] = ("text", "audio")
_PARTS: Mapping[str, RequestPart] = {"audio": "input_audio", "image": "input_image", "video": "input_video"}


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A chat request that can be answered.

    Attributes:
        modalities: what the client asked for. The plan may also make text, for the transcript of audio.
        format: an audio format's name.
        audio_in_video: whether the videos' sound is heard.
        ignored: the header that names the fields nobody reads.
    """

    request: Request
    plan: Plan
    modalities: frozenset[Modality]
    format: str
    audio_in_video: bool
    stream: bool
    include_usage: bool
    ignored: Mapping[str, str]


def chat_route_exists(service: Service) -> None:
    """``NotFoundError`` where the pipeline takes no messages."""
    if not service.takes_messages():
        name = service.dispatcher.pipeline.name
        raise NotFoundError(f"this model has no such route: pipeline {name} takes no messages")


def read_chat(service: Service, body: ChatBody, info: RequestInfo) -> tuple[ChatCall, tuple[EncodedClip, ...]]:
    """Validates ``body``, all but its clips, which are given back.

    Raises:
        InvalidRequestError: naming the field.
        NotFoundError: for the model.
    """
    dispatcher = service.dispatcher
    service.check_model(body.model)
    _refuse_what_cannot_be_honoured(body)
    modalities = _modalities(service, body.modalities)
    stream = bool(body.stream)
    if body.stream_options is not None and not stream:
        raise InvalidRequestError("stream_options: is only allowed with stream", "stream_options")
    audio = body.audio or AudioOptions()
    voice = None
    if "voice" in audio.model_fields_set:
        voice = resolve_voice(dispatcher.pipeline.voices, audio.voice, "audio.voice")
    format = _format(audio.format, stream)
    sampling = _sampling(body)
    messages, clips = read_messages(body.messages, dispatcher.config)
    audio_in_video = _audio_in_video(body, clips)
    plan = _plan(service, modalities, clips, audio_in_video)
    longest = "max_completion_tokens" if body.max_tokens is None else "max_tokens"
    unread = unread_sampling(
        dispatcher.pipeline, plan, sampling, lambda name: longest if name == "max_tokens" else name
    )
    call = ChatCall(
        request=service.new_request(
            info,
            seed=body.seed,
            priority=priority_of(body.priority, CHAT),
            extras=extras_of(body, dispatcher.extras),
            sampling=sampling,
            messages=messages,
            voice=voice,
        ),
        plan=plan,
        modalities=modalities,
        format=format,
        audio_in_video=audio_in_video,
        stream=stream,
        include_usage=body.stream_options is not None and bool(body.stream_options.include_usage),
        ignored=ignored_header([*unknown_fields(body), *_honoured_by_nobody(body, modalities, clips), *unread]),
    )
    return call, clips


def _modalities(service: Service, asked: Any) -> frozenset[Modality]:
    """Missing, null or empty is text, as OpenAI (C43)."""
    supported = [m for m in _MODALITIES if m in service.dispatcher.pipeline.output_kinds()]
    missing = asked is None or asked == []
    wanted = ["text"] if missing else asked
    if not isinstance(wanted, list) or any(item not in supported for item in wanted):
        said = " (the default)" if missing else ""
        raise InvalidRequestError(
            f"modalities: {shown(wanted)}{said} is not supported; a list of: {', '.join(supported)}", "modalities"
        )
    return frozenset(m for m in supported if m in wanted)


def _format(asked: Any, stream: bool) -> str:
    name = ("pcm16" if stream else "wav") if asked is None else asked
    return find_format("pcm" if name == "pcm16" else name, streamed=stream, param="audio.format").name


def _audio_in_video(body: ChatBody, clips: tuple[EncodedClip, ...]) -> bool:
    """Whether the videos' sound is wanted; vLLM's other processor options would change the answer unseen."""
    options = body.mm_processor_kwargs
    if options is None:
        return False
    for name in options.model_extra or {}:
        param = f"mm_processor_kwargs.{name}"
        raise InvalidRequestError(f"{shown(param)}: cannot be honoured by this server; only use_audio_in_video", param)
    return bool(options.use_audio_in_video) and any(clip.kind == "video" for clip in clips)


def _plan(
    service: Service, modalities: frozenset[Modality], clips: tuple[EncodedClip, ...], audio_in_video: bool
) -> Plan:
    """Audio brings the text along, as its transcript, where the pipeline makes text at all."""
    has_text = "text" in service.dispatcher.pipeline.output_kinds()
    outputs: set[OutputKind] = {*modalities, "text"} if has_text else {*modalities}
    parts: set[RequestPart] = {"messages", *(_PARTS[clip.kind] for clip in clips)}
    if audio_in_video:
        parts.add("input_audio")
    try:
        return service.dispatcher.plan(outputs, parts)
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, error.param or ("messages" if clips else "modalities")) from error


def _sampling(body: ChatBody) -> SamplingParams:
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise InvalidRequestError("max_tokens: differs from max_completion_tokens", "max_tokens")
    try:
        return SamplingParams(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k,
            repetition_penalty=body.repetition_penalty,
            max_tokens=next(iter(limits), None),
            stop=None if body.stop is None else tuple(body.stop),
            ignore_eos=body.ignore_eos,
        )
    except ValidationError as error:
        renamed = invalid(error)
        if renamed.param == "max_tokens" and body.max_tokens is None:
            raise InvalidRequestError(f"max_completion_{renamed.message[4:]}", "max_completion_tokens") from error
        raise renamed from error


def _refuse_what_cannot_be_honoured(body: ChatBody) -> None:
    """Fields of OpenAI that would change the answer and cannot be honoured; harmless values of them pass."""
    refused: dict[str, Any] = {
        "n": body.n not in (None, 1),
        "frequency_penalty": body.frequency_penalty,
        "presence_penalty": body.presence_penalty,
        "logprobs": body.logprobs,
        "top_logprobs": body.top_logprobs,
        "logit_bias": body.logit_bias,
        "response_format": body.response_format is not None and body.response_format.type != "text",
        "tools": body.tools and body.tool_choice != "none",
        "tool_choice": body.tool_choice not in (None, "none", "auto"),
        "functions": body.functions and body.function_call != "none",
        "function_call": body.function_call not in (None, "none", "auto"),
        "web_search_options": body.web_search_options is not None,
    }
    for name, present in refused.items():
        if present:
            only = {"n": "only 1", "response_format": 'only {"type": "text"}'}.get(name, "leave it out")
            raise InvalidRequestError(f"{name}: cannot be honoured by this server; {only}", name)


def _honoured_by_nobody(
    body: ChatBody, modalities: frozenset[Modality], clips: tuple[EncodedClip, ...]
) -> Iterator[str]:
    if body.mm_processor_kwargs is not None and not any(clip.kind == "video" for clip in clips):
        yield "mm_processor_kwargs"
    if body.tools:
        yield "tools"
    if body.functions:
        yield "functions"
    if body.audio is not None and "audio" not in modalities:
        yield "audio"
