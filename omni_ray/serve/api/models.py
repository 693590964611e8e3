"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from typing import Any

from fastapi import APIRouter

from omni_ray.serve.api.service import Service


def model_routes(service: Service) -> APIRouter:
    """The routes; an application serves exactly one model."""
    router = APIRouter()
    model = {
        "id": service.dispatcher.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "omni_ray",
    }

    @router.get("/models", response_description="the answer")
    async def list_models() -> dict[str, Any]:
        """The served model."""
        return {"object": "list", "data": [model]}

    @router.get("/models/{model_id:path}", response_description="the answer")
    async def retrieve_model(model_id: str) -> dict[str, Any]:
        """The served model, by its id."""
        service.check_model(model_id)
        return model

    return router
