"""``serve run graphs:<pipeline>``: every registered pipeline is an application builder here."""

from collections.abc import Callable

from ray import serve

from omni_ray.config.base import suggest
from omni_ray.registry import is_pipeline, pipeline_names
from omni_ray.serve.builder import build_application
from omni_ray.serve.resolve import AppArgs


def __getattr__(name: str) -> Callable[[AppArgs], serve.Application]:
    """The builder of pipeline ``name``. Ray Serve wants a function with one annotated parameter."""
    if name.startswith("__") or not is_pipeline(name):
        raise AttributeError(f"no pipeline {name!r} in graphs; {suggest(name, pipeline_names())}")

    def build(args: AppArgs) -> serve.Application:
        return build_application(name, args)

    build.__name__ = build.__qualname__ = name
    return build
