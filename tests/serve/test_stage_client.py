"""``StageClient`` against a real Ray Serve deployment."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from ray.serve.handle import DeploymentHandle

from omni_ray.config.deploy import StreamingConfig
from omni_ray.engine.types import Request
from omni_ray.errors import NotReadyError, ReplicaDiedError
from omni_ray.registry import load_pipeline
from omni_ray.serve import stage_client
from omni_ray.serve.events import Envelope
from omni_ray.serve.lifeline import LifelineHost
from omni_ray.serve.meters import Labels
from omni_ray.serve.planner import make_plan
from omni_ray.serve.stage_client import StageClient
from tests.conftest import wait_until


def test_calls_that_end_strangely(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that somebody else cancelled counts as a death, but late; a stage that Serve gave up is not ready.

    Serve's ``cancel`` raises again what kept a call from any replica. That hid our 503 behind a 500 (chaos run).
    """
    monkeypatch.setattr(stage_client, "OWN_CANCELLATION_S", 0.5)
    from ray import serve
    from ray.serve.exceptions import DeploymentUnavailableError

    @serve.deployment
    class Silent:
        async def run(self, envelope: Any, caller: Any) -> AsyncIterator[Any]:
            if envelope is not None:
                raise asyncio.CancelledError
            for nothing in ():
                yield nothing

        async def ping(self, was_ready: bool) -> bool:
            raise asyncio.CancelledError

    serve.run(Silent.bind(), name="gone", route_prefix="/gone")
    handle = serve.get_deployment_handle("Silent", "gone")
    assert list(handle.options(stream=True).run.remote(None, None)) == []
    began = time.monotonic()
    with pytest.raises(ReplicaDiedError, match="a call to stage thinker was cancelled"):
        asyncio.run(ask(handle))
    assert time.monotonic() - began > 0.5, "it did not wait for its own cancellation"
    with pytest.raises(NotReadyError, match="thinker: CancelledError"):
        asyncio.run(ask(handle, ping=True))
    serve.delete("gone")

    def given_up() -> bool:
        try:
            list(handle.options(stream=True).run.remote(None, None))
        except DeploymentUnavailableError:
            return True
        return False

    wait_until(given_up)
    with pytest.raises(NotReadyError, match="has no replica"):
        asyncio.run(ask(handle))


async def ask(handle: DeploymentHandle, ping: bool = False) -> None:
    plan = make_plan(load_pipeline("ramp"), {"text"}, {"messages"})
    lifelines, labels = LifelineHost("127.0.0.1", 1), Labels("gone", "ramp", "test", "-")
    client = StageClient("thinker", handle, labels, StreamingConfig(), lifelines)
    if ping:
        await client.ping(60, was_ready=True)
    async for _ in client.stream(Envelope(Request("r", seed=0), plan)):
        pass
