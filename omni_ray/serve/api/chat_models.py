"""The JSON body of ``POST /v1/chat/completions``: the fields that are read or refused; all others are ignored.

Every list is bounded. Bounds of sampling fields live in ``SamplingParams``; what needs a list of choices in its message
is checked by hand.
"""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, create_model

from omni_ray.serve.api.body import OpenAIModel
from omni_ray.serve.api.service import MAX_PRIORITY, MAX_SEED

_MAX_PARTS = 256
_MAX_TOOLS = 128


class InputAudio(OpenAIModel):
    """``data`` is base64 or a base64 ``data:`` URL; the bytes decide the format (C54), ``format`` is only a word."""

    data: str
    format: str | None = None


class AudioUrl(OpenAIModel):
    """A base64 ``data:`` URL, or one of a host that ``ingress.media_urls`` allows (C06)."""

    url: str


class ImageUrl(OpenAIModel):
    """A base64 ``data:`` URL, or one of a host that ``ingress.media_urls`` allows (C06)."""

    url: str


class VideoUrl(OpenAIModel):
    """A base64 ``data:`` URL, or one of a host that ``ingress.media_urls`` allows (C06)."""

    url: str


class ContentPart(OpenAIModel):
    """``type`` says which one of the others must be there."""

    type: str
    text: str | None = None
    input_audio: InputAudio | None = None
    audio_url: AudioUrl | None = None
    image_url: ImageUrl | None = None
    video_url: VideoUrl | None = None


def _parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class ChatMessage(OpenAIModel):
    """``content`` may also be a string."""

    role: str
    content: Annotated[
        list[ContentPart] | None, Field(max_length=_MAX_PARTS, fail_fast=True), BeforeValidator(_parts)
    ] = None
    tool_calls: list[Any] | None = Field(default=None, max_length=_MAX_TOOLS)
    function_call: Any = None


class AudioOptions(OpenAIModel):
    """The ``audio`` block. Defaults: the pipeline's voice; ``pcm16`` streamed, ``wav`` not streamed."""

    voice: Any = None
    format: Any = None


class StreamOptions(OpenAIModel):
    """``include_usage``: one last chunk with usage."""

    include_usage: bool | None = None


class ResponseFormat(OpenAIModel):
    """Only ``{"type": "text"}`` can be honoured."""

    type: str


class MediaOptions(OpenAIModel):
    """``mm_processor_kwargs``, as vLLM's. ``use_audio_in_video``: hear every video's sound, in time with its frames."""

    use_audio_in_video: bool | None = None


def _stops(stop: Any) -> Any:
    return [stop] if isinstance(stop, str) else stop


class ChatBody(OpenAIModel):
    """The body. ``priority``: 0, or more to be served after others; ours, not OpenAI's."""

    model: str
    messages: list[ChatMessage] = Field(min_length=1, fail_fast=True)
    modalities: Any = Field(default=None, description='["text"], ["audio"] or both; missing or empty is text')
    audio: AudioOptions | None = None
    mm_processor_kwargs: MediaOptions | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=256)]] | None, Field(max_length=16), BeforeValidator(_stops)
    ] = None
    ignore_eos: bool | None = None
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    priority: int | None = Field(
        default=None, ge=0, le=MAX_PRIORITY, description="whose turn is first: smaller numbers; 0 is the default"
    )
    n: int | None = Field(default=None, ge=1)
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    logit_bias: dict[str, Any] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = Field(default=None, max_length=_MAX_TOOLS)
    tool_choice: Any = None
    functions: list[Any] | None = Field(default=None, max_length=_MAX_TOOLS)
    function_call: Any = None
    web_search_options: Any = None


def chat_body(max_messages: int) -> type[ChatBody]:
    """``ChatBody`` of at most ``max_messages``: a longer list is refused as soon as it is too long (C55)."""
    messages = Field(min_length=1, max_length=max_messages, fail_fast=True)
    return create_model("ChatBody", __base__=ChatBody, messages=(list[ChatMessage], messages))
