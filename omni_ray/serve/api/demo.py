"""``GET /``: a page to talk to the model, in one file without anything from elsewhere."""

import base64
import hashlib
import json
import re
from collections.abc import Collection
from importlib.resources import files

from fastapi import APIRouter
from starlette.responses import HTMLResponse

from omni_ray.config.pipeline import OutputKind, RequestPart
from omni_ray.errors import InvalidRequestError, NotFoundError
from omni_ray.serve.api.service import Service

_SLOT = '<script type="application/json" id="server">{}</script>'


def demo_routes(service: Service) -> APIRouter:
    """The route; the page itself asks for no key, what it calls does."""
    router = APIRouter()
    if not service.dispatcher.config.demo_page:
        return router
    page = files("omni_ray.serve.api").joinpath("demo.html").read_text()
    headers = {
        "Content-Security-Policy": _policy(page),
        "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-cache",
    }
    filled = page.replace(_SLOT, _SLOT.replace("{}", _about(service)))

    @router.get("/", include_in_schema=False)
    async def demo() -> HTMLResponse:
        """The page, as far as the model can chat."""
        if _maker(service, "text", {"messages"}) is None:
            raise NotFoundError("this model takes no chat, so it has no demo page")
        return HTMLResponse(filled, headers=headers)

    return router


def _about(service: Service) -> str:
    """What the page must know of this server, as JSON that cannot end its script element."""
    dispatcher = service.dispatcher
    about = {
        "model": dispatcher.model_name,
        "description": dispatcher.pipeline.description,
        "text": _maker(service, "text", {"messages"}),
        "audio": _maker(service, "audio", {"messages"}),
        "hears": _maker(service, "text", {"messages", "input_audio"}) is not None,
        "keyed": bool(service.keys.names),
    }
    return json.dumps(about).replace("<", "\\u003c")


def _maker(service: Service, kind: OutputKind, parts: Collection[RequestPart]) -> str | None:
    """The stage that makes ``kind`` from ``parts`` of a chat, or None where the pipeline cannot."""
    try:
        return dict(service.dispatcher.plan({kind}, parts).outputs)[kind]
    except InvalidRequestError:
        return None


def _policy(page: str) -> str:
    """Only this file's own script and style run, and they talk to this server alone."""
    script, style = (_hash(re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)[0]) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _hash(source: str) -> str:
    digest = hashlib.sha256(source.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
