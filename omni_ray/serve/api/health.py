"""``GET /health`` (this process lives) and ``GET /ready`` (every stage answers)."""

from fastapi import APIRouter
from starlette.responses import JSONResponse

from omni_ray.errors import NotReadyError
from omni_ray.serve.api.errors import error_body, error_headers
from omni_ray.serve.api.schema import ERRORS
from omni_ray.serve.api.service import Service

_MAX_REASON = 200


def health_routes(service: Service) -> APIRouter:
    """The routes; they ask for no key."""
    router = APIRouter(responses=ERRORS)

    @router.head("/health", include_in_schema=False)
    @router.get("/health", response_description="the answer")
    async def health() -> dict[str, str]:
        """Liveness: says nothing about stages."""
        return {"status": "healthy"}

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", response_description="the answer")
    async def ready() -> JSONResponse:
        """Readiness: 503 with the stages that do not answer, and why."""
        readiness = await service.dispatcher.readiness()
        if readiness.ready:
            return JSONResponse({"status": "ready", "waiting": {}})
        error = NotReadyError(f"waiting for {', '.join(readiness.waiting) or 'stages'}")
        body = {
            "status": "waiting",
            "waiting": {name: _first_line(reason) for name, reason in readiness.waiting.items()},
            **error_body(error),
        }
        return JSONResponse(body, error.status, error_headers(error))

    return router


def _first_line(reason: str) -> str:
    """Anybody may ask, so no traceback leaves here."""
    return reason.strip().partition("\n")[0][:_MAX_REASON]
