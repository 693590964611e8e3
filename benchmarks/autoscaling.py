"""A load step on ``ramp``, on a cluster of three raylets: what replicas do, and whether anybody hears a gap.

    python benchmarks/autoscaling.py --few 2 --many 14 --step-s 5 --hold-s 25

Listeners come one after the other and each asks for one speech after another, until their phase is over. The talker is
bound by its places, code2wav by its time: half a second of work for the sound that ten listeners hear in a second. The
same load is played to one replica of each for comparison. Prints the tables of ``autoscaling.md``.
"""

import argparse
import asyncio
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import httpx
import ray
from ramp_cluster import APP, RampCluster, ramp_cluster, wait_until

from omni_ray.models.ramp import oracle
from omni_ray.playback import Playback
from omni_ray.serve.status import applications

SCALED = ("talker", "code2wav")
WORDS, LONG_WORDS = 24, 72
BYTES_PER_S = 48_000


@dataclass(frozen=True, slots=True)
class Heard:
    """One speech: seconds to its first sound, seconds that a player stood still, and whether every byte was right."""

    first_s: float
    underrun_s: float
    right: bool


@dataclass(slots=True)
class Run:
    """What was seen of one load step: rows of (second, listeners, running replicas, wanted replicas, queued, slack)."""

    heard: list[Heard] = field(default_factory=list)
    rows: list[tuple[float, int, str, int, float]] = field(default_factory=list)
    listeners: int = 0


def deploy_config(most: int) -> dict[str, Any]:
    """At most ``most`` replicas of talker and code2wav, two to a raylet."""
    scaling = {"max_replicas": most, "upscale_delay_s": 0.5, "downscale_delay_s": 5, "report_every_s": 0.5}
    deployment = {"autoscaling_config": scaling, "max_replicas_per_node": 2}
    talker = {"pace_ms": 60, "threads": 8, "max_num_seqs": 4, "reserved_seqs": 0}
    return {
        "stages": {
            "talker": {"deployment": deployment, "engine": talker},
            "code2wav": {"deployment": deployment, "engine": {"frame_ms": 8, "chunk_frames": [16]}},
        },
        "ingress": {"grace_s": 60},
    }


async def listen(client: httpx.AsyncClient, text: str) -> Heard:
    """One speech as it comes, in the ears of a player that starts with the first sound."""
    body = {"model": "ramp", "input": text, "voice": "a", "response_format": "pcm"}
    began, pcm, playback = time.monotonic(), b"", Playback()
    async with client.stream("POST", "/v1/audio/speech", json=body) as response:
        response.raise_for_status()
        async for piece in response.aiter_raw():
            playback.arrived(time.monotonic(), len(piece) / BYTES_PER_S)
            pcm += piece
    if playback.first is None:
        raise RuntimeError("an answer without sound")
    return Heard(playback.first - began, playback.underrun_s, pcm == oracle.pcm(text))


async def listener(client: httpx.AsyncClient, name: int, until: float, run: Run) -> None:
    """Speech after speech until ``until``; every fourth listener takes long ones."""
    run.listeners += 1
    words = LONG_WORDS if name % 4 == 3 else WORDS
    turn = 0
    while time.monotonic() < until:
        run.heard.append(await listen(client, " ".join([f"l{name}t{turn}", *["w"] * (words - 1)])))
        turn += 1
    run.listeners -= 1


def running() -> Mapping[str, int]:
    """Running replicas of the stages that scale."""
    deployments = applications()[APP].deployments
    return {stage: deployments[stage].running() for stage in SCALED}


async def watch(cluster: RampCluster, run: Run, began: float) -> None:
    """A row each second, until cancelled."""
    while True:
        count = await asyncio.to_thread(running)
        states = {stage: await asyncio.to_thread(cluster.states, stage) for stage in SCALED}
        leads = [lead for state in states["code2wav"] for lead in state.leads]
        loads = " ".join(f"{stage} {count[stage]} ({sum(s.load for s in states[stage]):.2f})" for stage in SCALED)
        queued = sum(state.engine.queued for stage in SCALED for state in states[stage])
        run.rows.append((time.monotonic() - began, run.listeners, loads, queued, min(leads, default=0.0)))
        await asyncio.sleep(1)


async def load_step(cluster: RampCluster, args: argparse.Namespace) -> Run:
    """Few listeners, many within ``step_s``, few again; then silence until everything is at its least."""
    run, began = Run(), time.monotonic()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=cluster.url, timeout=300, limits=limits) as client:
        watcher = asyncio.create_task(watch(cluster, run, began))
        end = began + 5 + args.step_s + args.hold_s
        tasks = [asyncio.create_task(listener(client, k, end + 10, run)) for k in range(args.few)]
        await asyncio.sleep(5)
        for k in range(args.few, args.many):
            tasks.append(asyncio.create_task(listener(client, k, end, run)))
            await asyncio.sleep(args.step_s / (args.many - args.few))
        await asyncio.gather(*tasks)
        await asyncio.to_thread(wait_until, lambda: max(running().values()) == 1, 60)
        await asyncio.sleep(1.5)
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
    return run


def summary(name: str, run: Run) -> str:
    """One row of the table of runs."""
    firsts = sorted(h.first_s for h in run.heard)
    late = [h.underrun_s for h in run.heard]
    p95 = firsts[int(0.95 * (len(firsts) - 1))]
    wrong = sum(not h.right for h in run.heard)
    return (
        f"| {name} | {len(run.heard)} | {wrong} | {sum(u > 0 for u in late)} | {max(late):.3f} | "
        f"{median(firsts):.2f} | {p95:.2f} |"
    )


def main() -> None:
    """Play both, print both."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--few", type=int, default=2)
    parser.add_argument("--many", type=int, default=14)
    parser.add_argument("--step-s", type=float, default=5)
    parser.add_argument("--hold-s", type=float, default=25)
    args = parser.parse_args()
    with ramp_cluster(2, deploy_config(4)) as cluster:
        scaled = asyncio.run(load_step(cluster, args))
        cluster.deploy(deploy_config(1))
        alone = asyncio.run(load_step(cluster, args))
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()}), Python {platform.python_version()}"
    print(f"{machine}, Ray {ray.__version__}, load average {os.getloadavg()[0]:.1f} at the end\n")
    print("| replicas | speeches | wrong bytes | with a gap | worst underrun s | first sound p50 s | p95 s |")
    print("|---|---|---|---|---|---|---|")
    print(summary("1 to 4", scaled))
    print(summary("1", alone))
    print("\n| s | listeners | running replicas (load) | queued | least slack s |\n|---|---|---|---|---|")
    for second, listeners, loads, queued, slack in scaled.rows:
        print(f"| {second:.0f} | {listeners} | {loads} | {queued} | {slack:.2f} |")


if __name__ == "__main__":
    main()
