"""OpenAI error bodies: the only place where an exception becomes an answer."""

import logging
import reprlib
from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse

from omni_ray.errors import AuthenticationError, ConfigError, InvalidRequestError, OmniRayError, SaturatedError

log = logging.getLogger("ray.serve.omni_ray")
"""Below Ray Serve's own logger, which alone writes into a replica's log."""


def error_body(error: OmniRayError) -> dict[str, Any]:
    """OpenAI's body; ``code`` equals the HTTP status (C42)."""
    return {"error": {"message": error.message, "type": error.error_type, "param": error.param, "code": error.status}}


def error_headers(error: OmniRayError) -> dict[str, str]:
    """Headers that belong to this error."""
    if isinstance(error, SaturatedError):
        return {"Retry-After": str(error.retry_after_s)}
    if isinstance(error, AuthenticationError):
        return {"WWW-Authenticate": "Bearer"}
    return {}


def error_response(error: OmniRayError) -> JSONResponse:
    """The whole answer for an error that came before the status line."""
    return JSONResponse(error_body(error), error.status, error_headers(error))


def public_error(error: Exception, request_id: str) -> OmniRayError:
    """The error a client may see: ours as it is, anything else logged with its traceback and named by the id only."""
    if isinstance(error, OmniRayError) and not isinstance(error, ConfigError):
        return error
    log.error("unexpected error, request id %s", request_id, exc_info=error)
    return OmniRayError(f"internal error, request id {request_id}")


def invalid(error: ValidationError, prefix: str = "") -> InvalidRequestError:
    """The 400 for a pydantic error: the first problem's path and words, never the value (it may be audio)."""
    return _first_problem(
        [
            (item["loc"], item["type"], item["msg"])
            for item in error.errors(include_input=False, include_context=False, include_url=False)
        ],
        prefix,
    )


def shown(value: object) -> str:
    """A client's value for a message, cut short before it is written out."""
    return reprlib.repr(value)


def path_of(loc: Sequence[int | str], prefix: str = "") -> str:
    """``messages[0].content[1].text`` for pydantic's ``loc``."""
    path = prefix
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def _first_problem(problems: list[tuple[tuple[int | str, ...], str, str]], prefix: str) -> InvalidRequestError:
    loc, kind, words = problems[0]
    words = words.removeprefix("Value error, ")
    if kind == "json_invalid":
        return InvalidRequestError(f"the body is not valid JSON: {words.removeprefix('Invalid JSON: ')}")
    if kind == "extra_forbidden":
        words = "unknown field"
    path = path_of(loc, prefix)
    more = f" (and {len(problems) - 1} more problems)" if len(problems) > 1 else ""
    return InvalidRequestError(f"{path or 'the body'}: {words[0].lower()}{words[1:]}{more}", path or None)


async def on_omni_ray_error(request: Request, error: Exception) -> JSONResponse:
    """Handler of ``OmniRayError``."""
    assert isinstance(error, OmniRayError)
    return error_response(error)


async def on_validation_error(request: Request, error: Exception) -> JSONResponse:
    """Handler of FastAPI's own validation: 400, never a bare 422."""
    assert isinstance(error, RequestValidationError)
    problems = [(tuple(item["loc"][1:]), str(item["type"]), str(item["msg"])) for item in error.errors()]
    return error_response(_first_problem(problems, ""))


async def on_http_exception(request: Request, error: Exception) -> JSONResponse:
    """Handler of Starlette's 404 and 405."""
    assert isinstance(error, HTTPException)
    answer = InvalidRequestError(f"{error.detail}: {request.method} on this path")
    body = error_body(answer)
    body["error"]["code"] = error.status_code
    return JSONResponse(body, error.status_code, error.headers)
