"""``StageClient`` against a real Ray Serve deployment."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from omni_ray.config.deploy import StreamingConfig
from omni_ray.engine.types import Request
from omni_ray.errors import NotReadyError
from omni_ray.registry import load_pipeline
from omni_ray.serve.events import Envelope
from omni_ray.serve.lifeline import LifelineHost
from omni_ray.serve.meters import Labels
from omni_ray.serve.planner import make_plan
from omni_ray.serve.stage_client import StageClient
from tests.conftest import wait_until


def test_a_stage_that_serve_gave_up_is_not_ready(cluster: str) -> None:
    """Serve's ``cancel`` raises again what kept a call from any replica. That hid our 503 behind a 500 (chaos run)."""
    from ray import serve
    from ray.serve.exceptions import DeploymentUnavailableError

    @serve.deployment
    class Silent:
        async def run(self, envelope: Any, caller: Any) -> AsyncIterator[Any]:
            for nothing in ():
                yield nothing

    serve.run(Silent.bind(), name="gone", route_prefix="/gone")
    handle = serve.get_deployment_handle("Silent", "gone")
    assert list(handle.options(stream=True).run.remote(None, None)) == []
    serve.delete("gone")

    def given_up() -> bool:
        try:
            list(handle.options(stream=True).run.remote(None, None))
        except DeploymentUnavailableError:
            return True
        return False

    wait_until(given_up)
    plan = make_plan(load_pipeline("ramp"), {"text"}, {"messages"})

    async def ask() -> None:
        lifelines, labels = LifelineHost("127.0.0.1"), Labels("gone", "ramp", "test", "-")
        client = StageClient("thinker", handle, labels, StreamingConfig(), lifelines)
        async for _ in client.stream(Envelope(Request("r", seed=0), plan)):
            pass

    with pytest.raises(NotReadyError, match="has no replica"):
        asyncio.run(ask())
