"""A manifest against the CRDs' schemas, with the API server's semantics, and built-in kinds against Kubernetes' own.

A CRD's ``openAPIV3Schema`` becomes JSON Schema: unknown fields are errors (strict field validation), nulls are pruned,
fields with a default are not required, and int-or-string, integer ranges and list-map keys are honoured. CEL rules are
not evaluated.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator, ValidationError, validators

Doc = dict[str, Any]
SCHEMAS = Path(__file__).parent / "schemas"
_INT_RANGE = {"int32": 2**31, "int64": 2**63}
_COPIED = {
    "type", "enum", "pattern", "minimum", "maximum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems",
    "uniqueItems", "minProperties", "maxProperties",
}  # fmt: skip


class StrictLoader(yaml.SafeLoader):
    """Refuses duplicate keys and leaves dates as strings, as the API server does."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        if twice := next((k for i, k in enumerate(keys) if k in keys[:i]), None):
            raise yaml.constructor.ConstructorError(None, None, f"duplicate key {twice!r}", node.start_mark)
        return super().construct_mapping(node, deep)


StrictLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in pairs if tag != "tag:yaml.org,2002:timestamp"]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load_documents(text: str) -> list[Doc]:
    """All documents that are not empty; raises ``yaml.YAMLError``."""
    return [prune_nulls(doc) for doc in yaml.load_all(text, Loader=StrictLoader) if doc is not None]


def prune_nulls(value: Any) -> Any:
    """What the API server keeps: a field set to null is a field left out."""
    if isinstance(value, dict):
        return {k: prune_nulls(v) for k, v in value.items() if v is not None}
    return [prune_nulls(v) for v in value] if isinstance(value, list) else value


def check_schema(doc: Doc) -> list[str]:
    """Problems of one document."""
    api_version, kind = str(doc.get("apiVersion")), str(doc.get("kind"))
    if not (doc.get("metadata") or {}).get("name"):
        return ["metadata.name: required"]
    if validator := _crds().get((api_version, kind)):
        errors = sorted(validator.iter_errors(doc), key=lambda e: [str(part) for part in e.absolute_path])
        return [f"{dotted(error.absolute_path)}: {error.message[:300]}" for error in errors]
    try:
        kubernetes_validate.validate(doc, kubernetes_validate.latest_version(), strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{dotted(error.path)}: {error.message[:300]}"]
    except kubernetes_validate.SchemaNotFoundError:
        return [f"(root): no schema for {kind} ({api_version})"]
    return []


def dotted(path: Any) -> str:
    """``a.b[0].c``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".") or "(root)"


@cache
def _crds() -> dict[tuple[str, str], Any]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # a megabyte each; the C loader is not in every build
    found = {}
    for path in sorted(SCHEMAS.glob("*.yaml")):
        spec = yaml.load(path.read_text(), Loader=loader)["spec"]
        for version in spec["versions"]:
            key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
            found[key] = _Validator(_json_schema(version["schema"]["openAPIV3Schema"]))
    return found


def _json_schema(node: Mapping[str, Any], *, structural: bool = True) -> Doc:
    """One OpenAPI v3 node as JSON Schema 2020-12."""
    out: Doc = {k: node[k] for k in _COPIED if k in node}
    for bound in ("Minimum", "Maximum"):  # OpenAPI 3.0 has booleans where JSON Schema has numbers
        if node.get(f"exclusive{bound}") is True:
            out[f"exclusive{bound}"] = out.pop(bound.lower())
    for combinator in ("anyOf", "oneOf", "allOf"):
        if combinator in node:
            out[combinator] = [_json_schema(part, structural=False) for part in node[combinator]]
    if "not" in node:
        out["not"] = _json_schema(node["not"], structural=False)
    if limit := _INT_RANGE.get(node.get("format", "")):
        out["minimum"] = max(out.get("minimum", -limit), -limit)
        out["maximum"] = min(out.get("maximum", limit - 1), limit - 1)
    if node.get("x-kubernetes-int-or-string"):
        out["type"] = ["integer", "string"]
    _add_properties(out, node, structural)
    if "items" in node:
        out["items"] = _json_schema(node["items"], structural=structural)
        if node.get("x-kubernetes-list-type") == "set":
            out["uniqueItems"] = True
        elif keys := node.get("x-kubernetes-list-map-keys"):
            properties = node["items"].get("properties", {})
            out["listMapKeys"] = {key: properties.get(key, {}).get("default") for key in keys}
    return out


def _add_properties(out: Doc, node: Mapping[str, Any], structural: bool) -> None:
    properties: Mapping[str, Any] = node.get("properties", {})
    if properties:
        out["properties"] = {k: _json_schema(v, structural=structural) for k, v in properties.items()}
    if required := [r for r in node.get("required", []) if "default" not in properties.get(r, {})]:
        out["required"] = required
    if isinstance(extra := node.get("additionalProperties"), Mapping):
        out["additionalProperties"] = _json_schema(extra, structural=structural)
    elif extra is not None:
        out["additionalProperties"] = extra
    elif structural and properties and not node.get("x-kubernetes-preserve-unknown-fields"):
        if node.get("x-kubernetes-embedded-resource"):
            out["properties"] |= {k: {} for k in ("apiVersion", "kind", "metadata") if k not in properties}
        out["additionalProperties"] = False


def _list_map_keys(_: Any, keys: Doc, items: Any, __: Any) -> Iterator[ValidationError]:
    seen: list[tuple[Any, ...]] = []
    for item in items if isinstance(items, list) else []:
        identity = tuple(item.get(k, default) for k, default in keys.items())
        if identity in seen:
            yield ValidationError(f"duplicate list entry {dict(zip(keys, identity, strict=True))}")
        seen.append(identity)


_Validator: Any = validators.extend(Draft202012Validator, {"listMapKeys": _list_map_keys})  # type: ignore[no-untyped-call]
