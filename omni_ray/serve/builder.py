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
    """Bind what ``resolve`` specified. Stage name = deployment name."""
    bound: dict[str, DeploymentHandle] = {}
    for spec in app.stages:
        upstream = {name: bound[name] for name in sorted(app.calls(spec.stage))}
        deployment = serve.deployment(Stage, name=spec.stage, **spec.derived.serve)
        bound[spec.stage] = deployment.bind(spec, upstream)
    ingress = serve.deployment(Ingress, name="ingress", **app.ingress.derived.serve)
    return ingress.bind(app.ingress, dict(bound))
