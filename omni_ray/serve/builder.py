"""The application builder: the only place that binds deployments.

No postponed annotations in this module or in ``graphs``: Ray Serve would then skip validating a builder's arguments.
"""

import logging

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from omni_ray.errors import ConfigError
from omni_ray.serve.cluster import check_fits, live_nodes
from omni_ray.serve.ingress import Ingress
from omni_ray.serve.resolve import AppArgs, ResolvedApp, resolve
from omni_ray.serve.specs import DeploymentSpec
from omni_ray.serve.stage import Stage

logger = logging.getLogger("ray.serve")


def build_application(name: str, args: AppArgs) -> serve.Application:
    """The Ray Serve application of pipeline ``name``: one deployment per stage and the ingress.

    Raises:
        ConfigError: every problem at once; nothing was started.
    """
    app = resolve(name, args)
    if ray.is_initialized():
        try:
            check_fits(app, live_nodes())
        except ConfigError as error:  # a warning only: an autoscaled cluster may grow
            logger.warning("%s may wait for resources:\n%s", name, error)
    return bind(app)


def bind(app: ResolvedApp) -> serve.Application:
    """Bind what ``resolve`` specified. Stage name = deployment name; stages that share a process have the last's."""
    runs = {stage.stage: spec for spec in app.deployments for stage in spec.stages}
    bound: dict[str, DeploymentHandle] = {}

    def bind_one(spec: DeploymentSpec) -> DeploymentHandle:
        if spec.name not in bound:
            upstream = {name: bind_one(runs[name]) for name in sorted(app.calls(spec))}
            bound[spec.name] = serve.deployment(Stage, name=spec.name, **spec.derived.serve).bind(spec, upstream)
        return bound[spec.name]

    handles = {stage.stage: bind_one(runs[stage.stage]) for stage in app.stages}
    ingress = serve.deployment(Ingress, name="ingress", **app.ingress.derived.serve)
    return ingress.bind(app.ingress, handles)
