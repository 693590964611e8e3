"""Processes and nodes die or hang under live streams: nobody helps, nothing is lost. ``ramp``, real Ray Serve."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from omni_ray.models.ramp import oracle
from omni_ray.serve.ports import free_port
from omni_ray.serve.status import applications
from tests.conftest import PATIENCE_S, Served, Serving, lose, wait_until
from tests.serve.crowd import CHAT, Hearing, heard, parse_sse
from tests.serve.test_ramp import TEXT, ask_chat, chat

WORDS = " ".join(f"w{k}" for k in range(40))
SLOW = {"thinker": {"delay_ms": 40}}
SLOWER = {"thinker": {"delay_ms": 100}}
"""Four seconds: until the last of eight has begun to sound, the first still goes on."""
AT_ONCE_S = 8.0
"""Far less than the 14 s for which Ray believes that a node lives of which nothing is left; half a second is usual."""


def config(**code2wav: Any) -> dict[str, Any]:
    engine = {"allow_request_faults": True, "stall_s": 3}
    engines = {"thinker": engine, "talker": engine, "code2wav": {**engine, "chunk_frames": [1, 4], **code2wav}}
    return {
        "stages": {
            name: {"deployment": {"health_check_period_s": 0.5}, "engine": engine} for name, engine in engines.items()
        }
    }


@pytest.fixture
def app(serving: Serving) -> Served:
    """Two talkers; a silence is longer than a hung engine is let live, and than Serve trusts a queue's length: 10 s."""
    deploy = {**config(child=True), "streaming": {"idle_timeout_s": 11}}
    deploy["stages"]["talker"]["deployment"]["num_replicas"] = 2
    return serving("ramp", deploy)


def children(app: Served, stage: str) -> list[psutil.Process]:
    return [child for pid in app.pids(stage) for child in psutil.Process(pid).children()]


def ready(app: Served) -> int:
    return httpx.get(f"{app.url}/ready").status_code


async def under_way(app: Served, streams: int = 1) -> None:
    """Wait until the last stage has spoken in so many streams, all of which still run."""
    await asyncio.to_thread(wait_until, lambda: sum(len(s.leads) for s in app.states("code2wav")) == streams)


async def test_an_engines_child_process_dies_idle(app: Served) -> None:
    """C09: the replica is alive and its engine is not: it is replaced without a request having to fail first."""
    before = app.replicas()
    for child in children(app, "code2wav"):
        child.kill()
    await asyncio.to_thread(wait_until, lambda: app.settled("code2wav", 1) != set(before["code2wav"]))
    async with app.async_client() as client:
        assert await ask_chat(client, TEXT) == (oracle.pcm(TEXT), TEXT)
    after = app.replicas()
    assert {stage for stage in after if after[stage] != before[stage]} == {"code2wav"}


async def test_an_engines_child_process_dies_in_mid_stream(app: Served) -> None:
    async with app.async_client(timeout=120) as client:
        running = Hearing(client, CHAT, chat(WORDS, ramp=SLOW))
        await asyncio.to_thread(wait_until, running.speaks)
        for child in children(app, "code2wav"):
            child.kill()
        assert heard(parse_sse(await running.answer)) == (oracle.pcm(WORDS), WORDS)


async def test_a_hung_stage_is_replaced_and_a_busy_one_is_not(app: Served) -> None:
    """C09: work in hand and no output for ``stall_s``; the stream goes on elsewhere. Slow steps are no hang."""
    before = app.replicas()
    async with app.async_client(timeout=120) as client:
        busy = {"thinker": {"delay_ms": 700}, "talker": {"delay_ms": 300}, "code2wav": {"delay_ms": 600}}
        few = " ".join(WORDS.split()[:4])
        assert await ask_chat(client, few, ramp=busy) == (oracle.pcm(few), few)
        assert app.replicas() == before
        hang = {**SLOW, "talker": {"hang_at": 60, "attempts": 1}}
        assert await ask_chat(client, WORDS, ramp=hang) == (oracle.pcm(WORDS), WORDS)
    after = app.replicas()
    assert {stage for stage in after if after[stage] != before[stage]} == {"talker"}


async def test_ready_while_every_stage_answers(app: Served) -> None:
    """C09, C73: a stage that does not answer makes us unready, with its name; liveness says nothing about stages."""
    async with app.async_client() as client:
        for pid in app.pids("code2wav"):
            os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.to_thread(wait_until, lambda: ready(app) == 503)
            answer = await client.get("/ready")
            assert int(answer.headers["retry-after"]) >= 1
            assert list(answer.json()["waiting"]) == ["code2wav"]
            assert "did not answer" in answer.json()["waiting"]["code2wav"]
            assert (await client.get("/health")).status_code == 200
        finally:
            for pid in app.pids("code2wav"):
                os.kill(pid, signal.SIGCONT)
        await asyncio.to_thread(wait_until, lambda: ready(app) == 200)


async def test_the_controller_dies(app: Served) -> None:
    """Live streams go on without it, new ones start, and it comes back."""
    (controller,) = [p for p in psutil.Process().children(recursive=True) if "ServeController" in "".join(p.cmdline())]
    async with app.async_client(timeout=120) as client:
        running = asyncio.create_task(ask_chat(client, WORDS, ramp=SLOW))
        await under_way(app)
        controller.kill()
        assert await ask_chat(client, TEXT) == (oracle.pcm(TEXT), TEXT)
        assert await running == (oracle.pcm(WORDS), WORDS)

        def answers() -> bool:
            from ray.exceptions import RayActorError

            try:
                return applications()[app.name].status == "RUNNING"
            except RayActorError:
                return False

        await asyncio.to_thread(wait_until, answers)
        for pid in app.pids("talker"):  # it does its work again
            os.kill(pid, signal.SIGKILL)
        assert await ask_chat(client, TEXT) == (oracle.pcm(TEXT), TEXT)


@contextmanager
def second_node() -> Iterator[psutil.Process]:
    """A node beside the test cluster's, with one seat; yields the process of ``ray start --block``."""
    import ray

    address = ray.get_runtime_context().gcs_address
    command = [
        Path(sys.executable).parent / "ray", "start", f"--address={address}", "--num-cpus=8", '--resources={"seat": 1}',
        f"--dashboard-agent-listen-port={free_port()}", f"--dashboard-agent-grpc-port={free_port()}",
        f"--metrics-export-port={free_port()}", "--object-store-memory=80000000", "--disable-usage-stats", "--block",
    ]  # fmt: skip
    alive = sum(node["Alive"] for node in ray.nodes())
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([str(word) for word in command], start_new_session=True, **quiet)  # type: ignore[call-overload]
    tree = psutil.Process(process.pid)
    try:
        wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == alive + 1)
        yield tree
    finally:
        lose(tree)
        process.wait(PATIENCE_S)


def seated() -> dict[str, Any]:
    """Two talkers, one seat each: one per node; everything else on the first node. Latents cross as object refs."""
    deploy, here = config(), {"ray_actor_options": {"resources": {"first_node": 0.01}}}
    for name in ("thinker", "code2wav"):
        deploy["stages"][name]["deployment"] = here
    deploy["stages"]["thinker"]["engine"] = {**deploy["stages"]["thinker"]["engine"], "latent_width": 60_000}
    deploy["stages"]["talker"]["deployment"] = {"num_replicas": 2, "ray_actor_options": {"resources": {"seat": 1}}}
    return {**deploy, "ingress": {"grace_s": 30, "deployment": here}}


async def test_a_node_leaves_and_another_one_is_lost(serving: Serving) -> None:
    """SIGTERM to a node's Ray: live streams finish on it. A node that vanishes: they are taken over at once."""
    texts = [f"{WORDS} {k}" for k in range(8)]
    expected = [(oracle.pcm(text), text) for text in texts]
    with second_node() as node:
        app = serving("ramp", seated())
        app.settled("talker", 2)
        app.settled("code2wav", 1)
        begun = app.states("code2wav")[0].started
        async with app.async_client(timeout=120) as client:
            running = [asyncio.create_task(ask_chat(client, text, ramp=SLOWER)) for text in texts]
            await under_way(app, len(texts))
            assert all(state.ongoing for state in app.states("talker"))
            node.terminate()
            assert await asyncio.gather(*running) == expected
            assert app.states("code2wav")[0].started == begun + len(texts), "a stream had to be taken over"
    with second_node() as node:
        app.settled("talker", 2)
        async with app.async_client(timeout=120) as client:
            running = [Hearing(client, CHAT, chat(text, ramp=SLOWER)) for text in texts]
            await under_way(app, len(texts))
            assert all(state.ongoing for state in app.states("talker"))
            lose(node)
            answers = await asyncio.gather(*(stream.answer for stream in running))
            assert [heard(parse_sse(answer)) for answer in answers] == expected
            assert max(stream.silence_s for stream in running) < AT_ONCE_S, "a healthy replica waited for the lost node"
            assert await ask_chat(client, TEXT) == (oracle.pcm(TEXT), TEXT)


async def test_a_replica_falls_silent(app: Served) -> None:
    """As on a node that is gone without a word: its streams go on elsewhere, long before anybody misses the process."""
    app.settled("talker", 2)
    begun = app.states("code2wav")[0].started
    texts = [f"{WORDS} {k}" for k in range(4)]
    async with app.async_client(timeout=120) as client:
        running = [asyncio.create_task(ask_chat(client, text, ramp=SLOWER)) for text in texts]
        await under_way(app, len(texts))
        assert all(state.ongoing for state in app.states("talker"))
        frozen = app.pids("talker")[0]
        os.kill(frozen, signal.SIGSTOP)
        try:
            assert await asyncio.gather(*running) == [(oracle.pcm(text), text) for text in texts]
            assert app.states("code2wav")[0].started > begun + len(texts), "nothing was taken over"
            assert psutil.Process(frozen).status() == psutil.STATUS_STOPPED, "Serve replaced it first"
        finally:
            os.kill(frozen, signal.SIGKILL)
