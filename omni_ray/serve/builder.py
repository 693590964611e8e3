"""The application builder: the only place that binds deployments.

No postponed annotations in this module or in ``graphs``: Ray Serve would then skip validating a builder's arguments.
"""

from ray import serve
from ray.serve.handle import DeploymentHandle

from omni_ray.serve.ingress import Ingress
from omni_ray.serve.resolve import AppArgs, ResolvedApp, resolve
from omni_ray.serve.stage import Stage


def build_application(name: str, args: AppArgs) -> serve.Application:
    """The Ray Serve application of pipeline ``name``: one deployment per stage and the ingress.

    Raises:
        ConfigError: every problem at once; nothing was started.
    """
    return bind(resolve(name, args))


def bind(app: ResolvedApp) -> serve.Application:
    """Bind what ``resolve`` specified. Stage name = deployment name."""
    bound: dict[str, DeploymentHandle] = {}
    for spec in app.stages:
        upstream = {name: bound[name] for name in sorted(app.calls(spec.stage))}
        deployment = serve.deployment(Stage, name=spec.stage, **spec.derived.serve)
        bound[spec.stage] = deployment.bind(spec, upstream)
    ingress = serve.deployment(Ingress, name="ingress", **app.ingress.derived.serve)
    return ingress.bind(app.ingress, dict(bound))
