"""OpenAPI: bodies are read by hand (limits, strict JSON), so each route states its body's schema itself."""

from typing import Any

from pydantic import BaseModel


def json_body(model: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of a route with a JSON body."""
    return _body("application/json", model.model_json_schema())


def form_body(model: type[BaseModel]) -> dict[str, Any]:
    """``openapi_extra`` of a route that takes a form with one file."""
    schema = model.model_json_schema()
    schema["properties"] = {"file": {"type": "string", "format": "binary"}, **schema["properties"]}
    schema["required"] = ["file", *schema.get("required", [])]
    return _body("multipart/form-data", schema)


def _body(content_type: str, schema: dict[str, Any]) -> dict[str, Any]:
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
