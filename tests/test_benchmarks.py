"""The baseline that ``benchmarks/overhead.py`` compares with runs the stages as they are now."""

import sys
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from one_process import start

from omni_ray.models.ramp import oracle
from omni_ray.serve.api.app import make_app
from omni_ray.serve.resolve import AppArgs, resolve


async def test_the_chain_in_one_process_equals_the_oracle() -> None:
    """It once stopped working when stages changed, and nothing said so."""
    app = make_app(await start(resolve("ramp", AppArgs())), {})
    body = {"model": "ramp", "input": "one two three", "voice": "b", "response_format": "pcm"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://ramp") as client:
        response = await client.post("/v1/audio/speech", json=body)
    assert (response.status_code, response.content) == (200, oracle.pcm("one two three", "b"))
