"""``GET /v1/models`` and ``GET /v1/models/{id}``."""

from typing import Any

from fastapi import APIRouter

from omni_ray.serve.api.ingress import Ingress


def model_routes(ingress: Ingress) -> APIRouter:
    """The routes; an application serves exactly one model."""
    router = APIRouter()
    model = {
        "id": ingress.dispatcher.model_name,
        "object": "model",
        "created": ingress.created,
        "owned_by": "omni_ray",
    }

    @router.get("/models")
    async def list_models() -> dict[str, Any]:
        """The served model."""
        return {"object": "list", "data": [model]}

    @router.get("/models/{model_id:path}")
    async def retrieve_model(model_id: str) -> dict[str, Any]:
        """The served model, by its id."""
        ingress.check_model(model_id)
        return model

    return router
