"""A JSON body -> a model -> a call, without holding up other requests; naming the fields that were ignored."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from omni_ray.errors import ConfigError, InvalidRequestError
from omni_ray.serve.api.errors import invalid, shown
from omni_ray.serve.api.incoming import Body
from omni_ray.serve.api.threads import in_thread

IGNORED_HEADER = "x-omni-ray-ignored"
_MAX_IGNORED = 20
_IN_THREAD_BYTES = 100_000
_MAX_OPENED, _MAX_COMMAS = 10_000, 100_000
"""Of "{" and "[", and of ",", in one body. So many take some 50 ms to validate, and pydantic lets nobody else run."""
_UNSAFE = re.compile(r"[^A-Za-z0-9_.\-]")


class OpenAIModel(BaseModel):
    """A JSON object of OpenAI's: unknown fields are kept apart (to be listed), known ones are checked strictly."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False, protected_namespaces=())


Model = TypeVar("Model", bound=BaseModel)
Call = TypeVar("Call")


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


async def read_json(body: Body, model: type[Model], read: Callable[[Model], Call]) -> Call:
    """``read`` of the JSON body as a ``model``, strictly: no "1.5" for a number, no NaN, no nesting without end (C50).

    What would take long to parse is refused while it arrives, and a large body is parsed and read in a thread (C55).
    """
    kind = body.content_type
    if kind != "application/json" and not kind.endswith("+json"):
        raise InvalidRequestError(f"the content type {shown(kind)} is not supported; send application/json")
    raw = bytearray()
    opened = commas = 0
    async with contextlib.aclosing(body.pieces()) as pieces:
        async for piece in pieces:
            opened += len(piece) - len(piece.translate(None, b"{["))
            commas += len(piece) - len(piece.translate(None, b","))
            if opened > _MAX_OPENED or commas > _MAX_COMMAS:
                raise InvalidRequestError(
                    f"the body holds too many values: more than {_MAX_OPENED} opening braces and brackets, or more "
                    f"than {_MAX_COMMAS} commas"
                )
            raw += piece
    if len(raw) > _IN_THREAD_BYTES:
        return await in_thread(lambda: read(_validated(model, raw)))
    return read(_validated(model, raw))


def _validated(model: type[Model], raw: bytearray) -> Model:
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


def ignored_header(names: Iterable[str]) -> dict[str, str]:
    """``x-omni-ray-ignored``: ASCII only, bounded, absent when nothing was ignored."""
    distinct = sorted({_UNSAFE.sub("?", name[:64]) for name in names})
    if not distinct:
        return {}
    shown = distinct[:_MAX_IGNORED]
    return {IGNORED_HEADER: ",".join(shown + (["..."] if len(distinct) > len(shown) else []))}
