"""OpenAPI: bodies are read and answers are sent by hand, so each route states both of them itself."""

from typing import Any, Final

from pydantic import BaseModel

from omni_ray.serve.api.field_notes import NOTES

_ERROR: Final[dict[str, Any]] = {
    "description": "OpenAI's error body; `param` names the field at fault",
    "content": {
        "application/json": {
            "schema": {
                "type": "object",
                "required": ["error"],
                "properties": {
                    "error": {
                        "type": "object",
                        "required": ["message", "type", "param", "code"],
                        "properties": {
                            "message": {"type": "string"},
                            "type": {"type": "string"},
                            "param": {"type": ["string", "null"]},
                            "code": {"type": "integer", "description": "the HTTP status"},
                        },
                    }
                },
            }
        }
    },
}
ERRORS: Final[dict[int | str, dict[str, Any]]] = {"4XX": _ERROR, "5XX": _ERROR}
"""``responses`` of every route: each error has one shape, and there is no bare 422."""


def answers(*content_types: str) -> dict[int | str, dict[str, Any]]:
    """``responses`` of a route that answers in one of these types, by what the request asks for."""
    return {200: {"description": "the answer", "content": {kind: {} for kind in content_types}}}


def json_body(model: type[BaseModel], served: str) -> dict[str, Any]:
    """``openapi_extra`` of a route with a JSON body. ``served`` is the only model's id."""
    return _body("application/json", model.model_json_schema(), served)


def form_body(model: type[BaseModel], served: str) -> dict[str, Any]:
    """``openapi_extra`` of a route that takes a form with one file. ``served`` is the only model's id."""
    schema = model.model_json_schema()
    schema["properties"] = {"file": {"type": "string", "format": "binary"}, **schema["properties"]}
    schema["required"] = ["file", *schema.get("required", [])]
    return _body("multipart/form-data", schema, served)


def _body(content_type: str, schema: dict[str, Any], served: str) -> dict[str, Any]:
    schema["properties"]["model"]["enum"] = [served]
    for name, field in schema["properties"].items():
        if name in NOTES:
            field.setdefault("description", NOTES[name])
    inlined = _inline(schema, schema.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {content_type: {"schema": inlined}}}}


def _inline(node: Any, definitions: dict[str, Any]) -> Any:
    """``node`` without references: no request model is recursive, and one document holds several models' names."""
    if isinstance(node, list):
        return [_inline(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inline(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {key: _inline(value, definitions) for key, value in node.items()}
