"""The JSON body of ``POST /v1/images/generations``, and everything its answer needs, decided before any stage is."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, Field

from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.types import ImagePrompt, Request
from omni_ray.errors import InvalidRequestError
from omni_ray.image import ImageFormat
from omni_ray.serve.api.body import OpenAIModel, extras_of, ignored_header, unknown_fields
from omni_ray.serve.api.priority import SPEECH, priority_of
from omni_ray.serve.api.request_log import RequestInfo
from omni_ray.serve.api.service import MAX_PRIORITY, MAX_SEED, Service, is_blank

_MAX_PROMPT = 32_000


class ImagesBody(OpenAIModel):
    """OpenAI's fields, and vLLM-Omni's from ``negative_prompt`` on."""

    model: str = Field(default="", description="the served model's id, which may be left out")
    prompt: str = Field(min_length=1, max_length=_MAX_PROMPT)
    n: int | None = Field(default=None, ge=1, description="pictures, each of the next seed; 1 if streamed")
    size: str | None = Field(default=None, pattern=r"^(auto|[1-9]\d{1,4}x[1-9]\d{1,4})$")
    response_format: Literal["b64_json"] | None = Field(default=None, description="base64 is all there is")
    output_format: ImageFormat | None = None
    output_compression: int | None = Field(default=None, ge=0, le=100, description="quality of jpeg and webp")
    background: Literal["auto", "opaque"] | None = None
    stream: bool | None = None
    partial_images: int | None = Field(default=None, ge=0, le=3, description="pictures on the way, if streamed")
    negative_prompt: str | None = Field(default=None, max_length=_MAX_PROMPT)
    num_inference_steps: int | None = Field(default=None, ge=1)
    guidance_scale: float | None = Field(default=None, ge=0, le=100)
    true_cfg_scale: float | None = Field(default=None, ge=0, le=100)
    seed: int | None = Field(default=None, ge=0, le=MAX_SEED)
    priority: int | None = Field(
        default=None, ge=0, le=MAX_PRIORITY, description="whose turn is first: smaller numbers, but at least 1"
    )


@dataclass(frozen=True, slots=True)
class ImagesCall:
    """A request for pictures that can be answered. ``ignored`` is a header."""

    request: Request
    format: ImageFormat
    quality: int
    stream: bool
    ignored: Mapping[str, str]


def read_images(
    service: Service, body: ImagesBody, info: RequestInfo, extras: Mapping[str, type[BaseModel]]
) -> ImagesCall:
    """Validates ``body``; raises ``InvalidRequestError`` naming the field, or ``NotFoundError`` for the model."""
    config = service.dispatcher.config
    if "model" in body.model_fields_set:
        service.check_model(body.model)
    if is_blank(body.prompt):
        raise InvalidRequestError("prompt: holds nothing to paint", "prompt")
    if body.n is not None and body.n > config.max_images:
        raise InvalidRequestError(f"n: at most {config.max_images} pictures may be asked for at once", "n")
    if body.num_inference_steps is not None and body.num_inference_steps > config.max_steps:
        raise InvalidRequestError(f"num_inference_steps: at most {config.max_steps} here", "num_inference_steps")
    stream, format = bool(body.stream), body.output_format or "png"
    if stream and (body.n or 1) > 1:
        raise InvalidRequestError("n: a stream carries one picture", "n")
    if body.partial_images and not stream:
        raise InvalidRequestError("partial_images: is only allowed with stream", "partial_images")
    if body.output_compression is not None and format == "png":
        raise InvalidRequestError("output_compression: is only allowed with jpeg and webp", "output_compression")
    width, height = _size(body.size, config.max_made_mpixels)
    priority = priority_of(body.priority, SPEECH)
    return ImagesCall(
        request=service.new_request(
            info,
            seed=body.seed,
            priority=priority,
            extras=extras_of(body, extras),
            sampling=SamplingParams(),
            image_prompt=ImagePrompt(
                text=body.prompt,
                negative=body.negative_prompt,
                count=body.n or 1,
                width=width,
                height=height,
                steps=body.num_inference_steps,
                guidance_scale=body.guidance_scale,
                true_cfg_scale=body.true_cfg_scale,
                previews=body.partial_images or 0,
            ),
        ),
        format=format,
        quality=100 if body.output_compression is None else body.output_compression,
        stream=stream,
        ignored=ignored_header([*unknown_fields(body), *_known_but_ignored(body, priority)]),
    )


def _size(size: str | None, max_mpixels: float) -> tuple[int | None, int | None]:
    if size is None or size == "auto":
        return None, None
    width, height = map(int, size.split("x"))
    if width * height > max_mpixels * 1e6:
        raise InvalidRequestError(f"size: at most {max_mpixels:g} megapixels may be asked for", "size")
    return width, height


def _known_but_ignored(body: ImagesBody, priority: int) -> Iterator[str]:
    if body.priority is not None and body.priority < priority:
        yield "priority"
