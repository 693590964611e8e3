"""The application: routes, key check, error handlers, request log."""

from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from omni_ray import __version__
from omni_ray.errors import OmniRayError
from omni_ray.serve.api.chat import chat_routes
from omni_ray.serve.api.demo import demo_routes
from omni_ray.serve.api.errors import on_http_exception, on_omni_ray_error, on_validation_error
from omni_ray.serve.api.fetch import MediaFetcher
from omni_ray.serve.api.gate import Gate
from omni_ray.serve.api.health import health_routes
from omni_ray.serve.api.images import image_routes
from omni_ray.serve.api.incoming import Bodies
from omni_ray.serve.api.keys import ApiKeys
from omni_ray.serve.api.models import model_routes
from omni_ray.serve.api.request_log import RequestLog, info_of
from omni_ray.serve.api.schema import ERRORS
from omni_ray.serve.api.service import Service
from omni_ray.serve.api.speech import speech_routes
from omni_ray.serve.api.transcription import transcription_routes
from omni_ray.serve.dispatcher import Dispatcher

_EXPOSED = (
    "retry-after",
    "x-channels",
    "x-omni-ray-ignored",
    "x-omni-ray-truncated",
    "x-request-id",
    "x-sample-rate",
)
"""Headers of ours that scripts of an allowed web page may read."""


def make_app(dispatcher: Dispatcher, api_keys: Mapping[str, str], replicas: int = 1) -> FastAPI:
    """The HTTP application over ``dispatcher``.

    Args:
        dispatcher: admits requests and streams their events.
        api_keys: keys that may use ``/v1``, by name; empty asks for none.
        replicas: ingress replicas there may be, this one included.
    """
    config = dispatcher.config
    keys = ApiKeys(api_keys)
    gate = Gate(config, keys.names, replicas)
    service = Service(dispatcher, keys, gate, Bodies(config), MediaFetcher(config.media_urls))
    app = FastAPI(
        title="omni_ray",
        version=__version__,
        description=dispatcher.pipeline.description,
        redirect_slashes=False,
    )
    bearer = HTTPBearer(auto_error=False)

    async def check_key(
        request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]
    ) -> None:
        info_of(request).api_key = service.keys.check(credentials.credentials if credentials else None)

    v1 = APIRouter(prefix="/v1", dependencies=[Depends(check_key)], responses=ERRORS)
    for routes in (chat_routes, speech_routes, transcription_routes, image_routes, model_routes):
        v1.include_router(routes(service))
    app.include_router(v1)
    app.include_router(health_routes(service))
    app.include_router(demo_routes(service))
    app.add_exception_handler(OmniRayError, on_omni_ray_error)
    app.add_exception_handler(RequestValidationError, on_validation_error)
    app.add_exception_handler(HTTPException, on_http_exception)
    app.add_middleware(RequestLog, ended=dispatcher.request_ended)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),  # OpenAI's own client for pages sends a dozen x-stainless-...; cookies stay refused
            expose_headers=_EXPOSED,
        )
    return app
