"""The complete Ray Serve config of an application, for ``serve deploy`` and for RayService's ``serveConfigV2``."""

from typing import Any

from omni_ray.config.deploy import read_deploy_config
from omni_ray.serve.resolve import AppArgs, ResolvedApp


def serve_config(app: ResolvedApp, args: AppArgs) -> dict[str, Any]:
    """All settings as ``args:``, the deploy config inline, and no ``deployments:`` block.

    A ``deployments:`` block would replace options silently; inline, the config needs no file on the node that builds.
    """
    given: dict[str, Any] = {}
    if args.model or app.config.model:
        given["model"] = args.model or app.config.model
    if args.served_model_name:
        given["served_model_name"] = args.served_model_name
    given["deploy_config"] = {"pipeline": app.pipeline.name, **read_deploy_config(args.deploy_config)[1]}
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": 8000},
        "logging_config": {"encoding": "JSON"},
        "applications": [
            {
                "name": app.pipeline.name,
                "route_prefix": "/",
                "import_path": f"graphs:{app.pipeline.name}",
                "args": given,
            }
        ],
    }
