"""Reading a request's body under a limit and turning JSON into a model; naming the fields that were ignored."""

import contextlib
import re
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from starlette.requests import Request

from omni_ray.errors import ConfigError, InvalidRequestError, PayloadTooLargeError
from omni_ray.serve.api.errors import invalid, shown

MB = 2**20
IGNORED_HEADER = "x-omni-ray-ignored"
_MAX_IGNORED = 20
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\-]")


class OpenAIModel(BaseModel):
    """A JSON object of OpenAI's: unknown fields are kept apart (to be listed), known ones are checked strictly."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


Model = TypeVar("Model", bound=BaseModel)


def with_extras(model: type[Model], extras: Mapping[str, type[BaseModel]]) -> type[Model]:
    """``model`` with one optional field per model extra.

    Raises:
        ConfigError: an extra has the name of a field of the route itself.
    """
    taken = sorted(set(extras) & set(model.model_fields))
    if taken:
        raise ConfigError([f"model extra {name!r} is already a field of {model.__name__}" for name in taken])
    fields: dict[str, Any] = {name: (extra | None, None) for name, extra in extras.items()}
    return create_model(model.__name__, __base__=model, **fields)


def extras_of(body: BaseModel, extras: Mapping[str, type[BaseModel]]) -> dict[str, Any]:
    """The validated model extras that the client gave."""
    return {name: value for name, value in body if name in extras and value is not None}


async def limited(request: Request, max_mb: float) -> AsyncGenerator[bytes, None]:
    """The body's pieces; ``PayloadTooLargeError`` as soon as the limit is passed, declared or not."""
    limit = int(max_mb * MB)
    too_large = PayloadTooLargeError(f"the body exceeds the limit of {max_mb:g} MB")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise too_large
    seen = 0
    async with contextlib.aclosing(request.stream()) as pieces:
        async for piece in pieces:
            seen += len(piece)
            if seen > limit:
                raise too_large
            yield piece


async def read_json(request: Request, model: type[Model], max_mb: float) -> Model:
    """The JSON body as a ``model``, strictly: no "1.5" for a number, no NaN, no nesting without end (C50)."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise InvalidRequestError(f"the content type {shown(kind)} is not supported; send application/json")
    async with contextlib.aclosing(limited(request, max_mb)) as pieces:
        raw = b"".join([piece async for piece in pieces])
    try:
        return model.model_validate_json(raw, strict=True)
    except ValidationError as error:
        raise invalid(error) from error


def unknown_fields(body: BaseModel, prefix: str = "") -> Iterator[str]:
    """Paths of the fields nobody reads; items of a list share one path."""
    for name in body.model_extra or {}:
        yield prefix + name
    for name in body.model_fields_set - set(body.model_extra or {}):
        value = body.__dict__.get(name)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, BaseModel):
                yield from unknown_fields(item, f"{prefix}{name}.")


def ignored_header(names: Iterator[str]) -> dict[str, str]:
    """``x-omni-ray-ignored``: ASCII only, bounded, absent when nothing was ignored."""
    distinct = sorted({_UNSAFE.sub("?", name[:64]) for name in names})
    if not distinct:
        return {}
    shown = distinct[:_MAX_IGNORED]
    return {IGNORED_HEADER: ",".join(shown + (["..."] if len(distinct) > len(shown) else []))}
