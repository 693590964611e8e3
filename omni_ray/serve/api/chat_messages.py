"""OpenAI messages -> the stages' messages, with the media they hold counted in order of appearance."""

import re
from collections.abc import Sequence

from omni_ray.config.ingress import IngressConfig
from omni_ray.engine.types import MediaPart, Message, TextPart
from omni_ray.errors import InvalidRequestError
from omni_ray.serve.api.chat_models import ChatMessage, ContentPart
from omni_ray.serve.api.errors import shown
from omni_ray.serve.api.media import EncodedClip, Kind, MediaUrl
from omni_ray.serve.api.service import is_blank

_TYPES = ("text", "input_audio", "audio_url", "image_url", "video_url")
_WEB_URL = re.compile("https?://", re.IGNORECASE)
_MAX_URL_CHARS = 2048
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def read_messages(
    messages: Sequence[ChatMessage], limits: IngressConfig
) -> tuple[tuple[Message, ...], tuple[EncodedClip, ...]]:
    """Checks roles, contents and limits (C47, C55); decodes nothing yet.

    Raises:
        InvalidRequestError: naming the message and field.
    """
    clips: list[EncodedClip] = []
    most = limits.max_request_text_chars
    last = len(messages) - 1
    read = tuple(_message(m, f"messages[{i}]", limits, clips, i == last) for i, m in enumerate(messages))
    if read[-1].role == "assistant":
        param = f"messages[{last}].role"
        raise InvalidRequestError(f"{param}: the last message must not be the assistant's", param)
    if sum(len(part.text) for m in read for part in m.content if isinstance(part, TextPart)) > most:
        raise InvalidRequestError(
            f"messages: all text together has more than the {most} characters allowed", "messages"
        )
    return read, tuple(clips)


def _message(message: ChatMessage, where: str, limits: IngressConfig, clips: list[EncodedClip], last: bool) -> Message:
    role = _ROLES.get(message.role)
    if role is None:
        raise _error(f"{where}.role", f"{shown(message.role)} is not supported here; roles: {', '.join(_ROLES)}")
    if message.tool_calls or message.function_call is not None:
        raise _error(
            f"{where}.{'tool_calls' if message.tool_calls else 'function_call'}", "tools are not supported here"
        )
    if message.content is None:
        raise _error(
            f"{where}.content", "is required: a string or a list of parts; earlier audio is not kept by its id"
        )
    content = tuple(_part(part, role, f"{where}.content[{i}]", limits, clips) for i, part in enumerate(message.content))
    texts = [part.text for part in content if isinstance(part, TextPart)]
    if sum(map(len, texts)) > limits.max_text_chars:
        raise _error(f"{where}.content", f"has more than the {limits.max_text_chars} characters allowed")
    # A chat goes on after an answer that was broken off before its first word; only a question must be one.
    if (role == "user" or last) and len(texts) == len(content) and is_blank("".join(texts)):
        raise _error(f"{where}.content", "is empty")
    return Message(role, content)


def _part(
    part: ContentPart, role: str, where: str, limits: IngressConfig, clips: list[EncodedClip]
) -> TextPart | MediaPart:
    if part.type == "text":
        if part.text is None:
            raise _error(f"{where}.text", "field required")
        return TextPart(part.text)
    if part.type == "input_audio":
        if part.input_audio is None:
            raise _error(f"{where}.input_audio", "field required")
        clip = _clip(f"{where}.input_audio.data", part.input_audio.data, "audio", limits)
    elif part.type == "audio_url":
        if part.audio_url is None:
            raise _error(f"{where}.audio_url", "field required")
        clip = _clip_of_url(f"{where}.audio_url.url", part.audio_url.url, "audio", limits)
    elif part.type == "image_url":
        if part.image_url is None:
            raise _error(f"{where}.image_url", "field required")
        clip = _clip_of_url(f"{where}.image_url.url", part.image_url.url, "image", limits)
    elif part.type == "video_url":
        if part.video_url is None:
            raise _error(f"{where}.video_url", "field required")
        clip = _clip_of_url(f"{where}.video_url.url", part.video_url.url, "video", limits)
    else:
        raise _error(f"{where}.type", f"{shown(part.type)} is not supported here; types: {', '.join(_TYPES)}")
    if role != "user":
        raise _error(where, f"{clip.kind} may only be in user messages, not in the {role}'s")
    if len(clips) == limits.max_media_parts:
        raise _error(where, f"a request may hold {limits.max_media_parts} media parts, no more")
    clips.append(clip)
    return MediaPart(clip.kind, len(clips) - 1)


def _clip(param: str, data: str, kind: Kind, limits: IngressConfig) -> EncodedClip:
    """A clip as base64, as a ``data:`` URL, or to be fetched, if the operator allows any host at all (C06)."""
    return _to_fetch(param, data, kind, limits) if _WEB_URL.match(data) else EncodedClip(param, data, kind)


def _clip_of_url(param: str, url: str, kind: Kind, limits: IngressConfig) -> EncodedClip:
    return EncodedClip(param, url, kind) if url[:5].lower() == "data:" else _to_fetch(param, url, kind, limits)


def _to_fetch(param: str, url: str, kind: Kind, limits: IngressConfig) -> EncodedClip:
    if not limits.media_urls.allow:
        raise _error(param, "media by URL is off; send a base64 data: URL")
    if not _WEB_URL.match(url) or len(url) > _MAX_URL_CHARS:
        raise _error(param, f"must be a data: URL, or an http(s) URL of at most {_MAX_URL_CHARS} characters")
    return EncodedClip(param, MediaUrl(url), kind)


def _error(param: str, words: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param}: {words}", param)
