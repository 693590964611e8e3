"""A host vanishes without FIN or RST, as one that loses its power: what clients see, and whether the rest recovers.

    python benchmarks/lost_host.py              # a lost host has one replica of each stage
    python benchmarks/lost_host.py --ingress    # and one of two ingress replicas
    python benchmarks/lost_host.py --defaults   # with the product's and Ray's own time limits, which are longer

The host is a raylet in a network namespace of its own, behind a pair of virtual interfaces; the loss is its end of the
cable taken down in mid-stream, so that packets to it go nowhere and nobody is told. Needs root with CAP_NET_ADMIN and
CAP_SYS_ADMIN, ``ip`` (iproute2), ``unshare`` and ``nsenter`` (util-linux). A spare raylet may take the lost replicas.
"""

import argparse
import asyncio
import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
from ramp_client import Answer, Route, ask, some_text
from ramp_cluster import RampCluster, deploy_config, ramp_cluster, wait_until

HERE, THERE = "10.77.0.1", "10.77.0.2"
OURS, THEIRS = "omni-here", "omni-there"
SEATS = {"seat": 4}
STREAMS = 12
WAYS: tuple[tuple[Route, dict[str, Any]], ...] = (
    ("chat sse", {"thinker": {"delay_ms": 150}}),
    ("speech", {"talker": {"delay_ms": 50}}),
)
"""Routes of the streams, which take twelve seconds."""
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--ingress", action="store_true", help="the lost host has an ingress replica, too")
parser.add_argument("--defaults", action="store_true")
parser.add_argument("--seconds", type=float, default=60, help="to go on asking after the loss")


def run(*command: str) -> None:
    """A command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")


class Host:
    """A network namespace with one cable to this one."""

    def __init__(self) -> None:
        missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
        if missing:
            raise SystemExit(f"not installed: {', '.join(missing)}")
        self._keeper = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        self._raylet: subprocess.Popen[bytes] | None = None

    def connect(self) -> None:
        """Lay the cable."""
        time.sleep(0.3)
        if self._keeper.poll() is not None:
            raise SystemExit("no network namespace can be made here: that needs CAP_SYS_ADMIN")
        run("ip", "link", "add", OURS, "type", "veth", "peer", "name", THEIRS, "netns", str(self._keeper.pid))
        run("ip", "addr", "add", f"{HERE}/24", "dev", OURS)
        run("ip", "link", "set", OURS, "up")
        self._inside("ip", "link", "set", "lo", "up")
        self._inside("ip", "addr", "add", f"{THERE}/24", "dev", THEIRS)
        self._inside("ip", "link", "set", THEIRS, "up")
        (cable,) = json.loads(self._inside("ip", "-json", "link", "show", THEIRS))
        # else the kernel asks in vain who has the address, and tells all senders that the host is gone
        run("ip", "neigh", "replace", THERE, "lladdr", cable["address"], "dev", OURS, "nud", "permanent")

    def _inside(self, *command: str) -> str:
        enter = ["nsenter", "--net", f"--target={self._keeper.pid}", *command]
        return subprocess.run(enter, check=True, capture_output=True, text=True).stdout

    def join(self, address: str) -> None:
        """Start Ray there."""
        resources = '{"seat": 4}'
        start = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={address}", "--num-cpus=4"]
        there = [f"--node-ip-address={THERE}", f"--resources={resources}", "--object-store-memory=200000000", "--block"]
        enter = ["nsenter", "--net", f"--target={self._keeper.pid}"]
        self._raylet = subprocess.Popen([*enter, *start, *there], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def vanish(self) -> None:
        """From now on nothing reaches it, and nothing comes from it."""
        self._inside("ip", "link", "set", THEIRS, "down")

    def stop(self) -> None:
        """End everything there, and the namespace with its cable."""
        for parent in filter(None, (self._raylet, self._keeper)):
            children = psutil.Process(parent.pid).children(recursive=True) if parent.poll() is None else []
            for process in (*children, parent):
                process.kill()
            parent.wait()


@contextmanager
def host() -> Iterator[Host]:
    made = Host()
    try:
        made.connect()
        yield made
    finally:
        made.stop()


def config(with_ingress: bool, defaults: bool) -> dict[str, Any]:
    """Two replicas of each stage, one per node; latents cross as object refs."""
    deploy = deploy_config()
    spread = {"num_replicas": 2, "max_replicas_per_node": 1, "ray_actor_options": {"resources": {"seat": 1}}}
    for stage in deploy["stages"].values():
        stage["deployment"] = spread
    deploy["ingress"]["deployment"] = spread if with_ingress else {"ray_actor_options": {"resources": {"head": 0.01}}}
    if defaults:
        del deploy["streaming"]
    return deploy


async def streams(ramp: RampCluster, rng: random.Random) -> list[Answer]:
    """Long chats and speech, each over a connection of its own."""

    async def one(number: int) -> Answer:
        async with httpx.AsyncClient(base_url=ramp.url, timeout=200) as client:
            route, faults = WAYS[number % 2]
            return await ask(client, route, some_text(rng, 80), deadline_s=200, faults=faults)

    return await asyncio.gather(*map(one, range(STREAMS)))


async def others(ramp: RampCluster, rng: random.Random, until: float) -> list[Answer]:
    """A short request every half second, whatever became of those before."""

    async def one() -> Answer:
        async with httpx.AsyncClient(base_url=ramp.url, timeout=200) as client:
            return await ask(client, "chat sse", some_text(rng, 4), deadline_s=120)

    tasks = []
    while time.monotonic() < until:
        tasks.append(asyncio.create_task(one()))
        await asyncio.sleep(0.5)
    return await asyncio.gather(*tasks)


async def readiness(ramp: RampCluster, lost: float, until: float) -> None:
    """Print when ``/ready`` changes."""
    before = 200
    async with httpx.AsyncClient(base_url=ramp.url, timeout=5) as client:
        while time.monotonic() < until:
            try:
                now = (await client.get("/ready")).status_code
            except httpx.HTTPError as error:
                now = type(error).__name__  # type: ignore[assignment]
            if now != before:
                print(f"- /ready: {now} after {time.monotonic() - lost:.0f} s", flush=True)
                before = now
            await asyncio.sleep(0.5)


def told(name: str, answers: list[Answer], lost: float) -> None:
    """A line about some requests."""
    outcomes = Counter(answer.outcome for answer in answers)
    bad = [a for a in answers if a.outcome != "right"]
    gaps = sorted(answer.longest_gap_s for answer in answers)
    first = sorted(a.first_sound_s for a in answers if a.first_sound_s is not None)
    print(f"- {name}: {dict(outcomes)}; longest gaps {[round(gap, 1) for gap in gaps[-6:]]} s; "
          f"slowest first sounds {[round(s, 1) for s in first[-6:]]} s")  # fmt: skip
    for detail, number in Counter(f"{a.route}: {a.outcome}: {a.detail}" for a in bad).items():
        print(f"    - {number} x {detail}")
    if bad:
        print(f"    - begun {min(a.started for a in bad) - lost:.0f} s to {max(a.started for a in bad) - lost:.0f} s "
              f"after the loss, ended after {max(a.ended for a in bad) - lost:.0f} s at the latest")  # fmt: skip


async def measure(ramp: RampCluster, there: Host, seconds: float) -> None:
    import ray

    rng = random.Random(5)
    running = asyncio.create_task(streams(ramp, rng))
    await asyncio.sleep(4)
    print(
        f"- streams in each talker at the loss: {[s.ongoing for s in await asyncio.to_thread(ramp.states, 'talker')]}"
    )
    there.vanish()
    lost = time.monotonic()
    beside = asyncio.create_task(others(ramp, rng, lost + seconds))
    ready = asyncio.create_task(readiness(ramp, lost, lost + seconds))

    def known() -> bool:
        return any(not node["Alive"] for node in ray.nodes())

    if await asyncio.to_thread(wait_until, known, 120):
        print(f"- Ray calls the node dead after {time.monotonic() - lost:.0f} s", flush=True)
    told("streams at the loss", await running, lost)
    told("short requests from then on", await beside, lost)
    await ready
    whole = lambda: all(len(ramp.states(s)) == 2 for s in ("thinker", "talker", "code2wav"))  # noqa: E731
    if await asyncio.to_thread(wait_until, whole, 120):
        print(f"- two replicas of each stage again, {time.monotonic() - lost:.0f} s after the loss at the latest")
    told("then", await others(ramp, rng, time.monotonic() + 5), lost)
    idle = await asyncio.to_thread(wait_until, lambda: ramp.at_work() == 0, 30)
    print(f"- left at work: {'nothing' if idle else ramp.at_work()}")


def main() -> None:
    given = parser.parse_args()
    with host() as there:
        head: dict[str, Any] = {"node_ip_address": HERE, "resources": {"head": 1, **SEATS}}
        if given.defaults:
            head["_system_config"] = {}
        begin = deploy_config()
        for stage in begin["stages"].values():
            stage["deployment"] = {}
        begin["ingress"] = {}
        with ramp_cluster(0, begin, **head) as ramp:
            import ray

            there.join(ramp.cluster.address)
            if not wait_until(lambda: len(ray.nodes()) == 2, 60):
                raise SystemExit("the host did not join")
            ramp.deploy(config(given.ingress, given.defaults))
            ramp.cluster.add_node(num_cpus=4, resources=SEATS, node_ip_address=HERE)
            asyncio.run(measure(ramp, there, given.seconds))


if __name__ == "__main__":
    main()
