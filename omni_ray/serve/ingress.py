"""The deployment that faces HTTP: an OpenAI-compatible app over the dispatcher."""

from collections.abc import Mapping

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle

from omni_ray.plugins import load_plugins
from omni_ray.serve.api.app import make_app
from omni_ray.serve.api.keys import read_api_keys
from omni_ray.serve.dispatcher import Dispatcher
from omni_ray.serve.logs import log_as
from omni_ray.serve.meters import Labels
from omni_ray.serve.node import lifeline_host
from omni_ray.serve.proxy_timeout import warn_of_total_timeout
from omni_ray.serve.serve_options import check_actual_options
from omni_ray.serve.specs import IngressSpec


@serve.ingress()
class Ingress:
    """One replica of the ingress. It is the only deployment that speaks HTTP and the only one that retries."""

    async def __init__(self, spec: IngressSpec, stages: Mapping[str, DeploymentHandle]) -> None:  # type: ignore[misc]
        self._dispatcher: Dispatcher | None = None
        load_plugins()
        check_actual_options("ingress", spec.derived)
        self._api_keys = read_api_keys(spec.config)
        self._replicas = spec.derived.num_replicas
        context = serve.get_replica_context()
        labels = Labels(context.app_name, spec.pipeline.name, "ingress", context.replica_tag)
        log_as(spec.pipeline.name, "ingress")
        self._dispatcher = Dispatcher(
            spec.pipeline, spec.config, spec.streaming, spec.observe, spec.model_name, stages, lifeline_host(), labels
        )
        await warn_of_total_timeout(self._dispatcher.max_audio_seconds)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Ray Serve asks for the app after the constructor."""
        assert self._dispatcher is not None
        app = make_app(self._dispatcher, self._api_keys, self._replicas)
        self._dispatcher.started()
        return app

    async def active(self) -> int:
        """Requests alive in this replica, for tests and dashboards."""
        assert self._dispatcher is not None
        return self._dispatcher.active

    async def leave(self) -> None:
        """Begin nothing more: the application is about to be deleted, which Serve's proxy would answer with 404."""
        assert self._dispatcher is not None
        self._dispatcher.leave()

    async def __del__(self) -> None:
        """Ray Serve's shutdown hook."""
        if self._dispatcher is not None:
            await self._dispatcher.stop()
