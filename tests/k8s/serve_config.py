"""``serveConfigV2`` against Ray Serve's own schema, and its applications against ours: what they build, and where to.

Kubernetes takes the string as it is, and Ray answers 200 to an import path that leads nowhere.
"""

from collections.abc import Iterator
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from ray._common.utils import import_attr
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve._private.build_app import build_app
from ray.serve.schema import ServeDeploySchema

from omni_ray.errors import ConfigError
from omni_ray.serve.cluster import check_fits
from omni_ray.serve.resolve import AppArgs, ResolvedApp, resolve
from tests.k8s.crd_schema import Doc, StrictLoader, dotted
from tests.k8s.ray_cluster import cluster_of, ray_nodes

WHERE = "spec.serveConfigV2"


def serve_config(doc: Doc) -> Doc:
    """The parsed ``serveConfigV2``."""
    config: Doc = yaml.load(doc["spec"].get("serveConfigV2") or "{}", Loader=StrictLoader)
    return config


def check_serve_config(doc: Doc) -> list[str]:
    """Problems of the config: Serve's schema, keys it would ignore, what we never set, the applications."""
    try:
        config = serve_config(doc)
    except yaml.YAMLError as error:
        return [f"{WHERE}: not YAML: {error}"]
    if not isinstance(config, dict) or not config.get("applications"):
        return [f"{WHERE}: must be a mapping with a list of applications"]
    try:
        ServeDeploySchema.model_validate(config)
    except ValidationError as error:
        return [f"{WHERE}.{dotted(e['loc'])}: {e['msg']}" for e in error.errors()]
    problems = [*_unknown_keys(ServeDeploySchema, config, WHERE), *_fixed(config)]
    for number, app in enumerate(config["applications"]):
        problems += [f"{WHERE}.applications[{number}].{p}" for p in _application_problems(app, doc)]
    return problems


def resolved_apps(doc: Doc) -> list[ResolvedApp]:
    """What each application's arguments come to."""
    return [
        resolve(app["import_path"].partition(":")[2], AppArgs.model_validate(app.get("args", {})))
        for app in serve_config(doc)["applications"]
    ]


def _fixed(config: Doc) -> Iterator[str]:
    if config.get("proxy_location", "EveryNode") != "EveryNode":
        yield f"{WHERE}.proxy_location: must be EveryNode, or worker pods never become ready (kuberay#4994)"
    if "target_capacity" in config:
        yield f"{WHERE}.target_capacity: the operator's own during incremental upgrades (kuberay#4777)"


def _application_problems(app: Doc, doc: Doc) -> Iterator[str]:
    if not (app.get("route_prefix") or "/").startswith("/"):
        yield "route_prefix: must start with '/'"
    if app.get("deployments"):
        yield "deployments: replaces the builder's options silently; put every setting into args: deploy_config"
    try:
        builder = import_attr(app["import_path"])
    except (ImportError, AttributeError) as error:
        yield f"import_path: {app['import_path']!r} leads nowhere: {error}"
        return
    try:
        build_app(call_user_app_builder_with_args_if_necessary(builder, app.get("args") or {}), name=app["name"])
        resolved = resolve(app["import_path"].partition(":")[2], AppArgs.model_validate(app.get("args") or {}))
    except (ConfigError, ValidationError) as error:
        yield f"args: {error}"
        return
    if resolved.config.ingress.max_audio_seconds is None:
        yield "args.deploy_config.ingress.max_audio_seconds: must be set; every grace follows from it"
    if resolved.config.ingress.grace_s is not None:
        yield "args.deploy_config.ingress.grace_s: must be left out, so that it follows from max_audio_seconds"
    for size, count in (("smallest", "minReplicas"), ("largest", "maxReplicas")):
        try:
            check_fits(resolved, ray_nodes(cluster_of(doc), count), least=size == "smallest")
        except ConfigError as error:
            yield f"args: does not fit the {size} cluster that the worker groups make: {error}"
            return


def _unknown_keys(model: Any, value: Any, path: str) -> Iterator[str]:
    """Keys that Ray Serve ignores without a word."""
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _unknown_keys(model, item, f"{path}[{number}]")
        return
    if not isinstance(value, dict):
        return
    fields = {alias: f for name, f in model.model_fields.items() for alias in (name, f.alias) if alias}
    for key, item in value.items():
        if key not in fields:
            yield f"{path}.{key}: unknown key, Ray Serve would ignore it"
            continue
        todo = [fields[key].annotation]
        while todo:  # a nested model inside Optional or list; where a plain dict will do, anything goes
            kind = todo.pop()
            if dict in (kind, *(getattr(part, "__origin__", part) for part in get_args(kind))):
                break
            if hasattr(kind, "model_fields"):
                yield from _unknown_keys(kind, item, f"{path}.{key}")
                break
            todo += get_args(kind)
