"""``serve build graphs.built:<pipeline>``: applications bound with default arguments."""

from ray import serve

from omni_ray.config.base import suggest
from omni_ray.registry import is_pipeline, pipeline_names
from omni_ray.serve.builder import build_application
from omni_ray.serve.resolve import AppArgs


def __getattr__(name: str) -> serve.Application:
    """The default application of pipeline ``name``."""
    if name.startswith("__") or not is_pipeline(name):
        raise AttributeError(f"no pipeline {name!r} in graphs.built; {suggest(name, pipeline_names())}")
    return build_application(name, AppArgs())
