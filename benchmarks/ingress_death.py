"""One of two ingress replicas is killed under live requests: what their clients hear.

    python benchmarks/ingress_death.py                   # Serve's own proxy, with its setting
    python benchmarks/ingress_death.py --haproxy ours    # HAProxy mode with our settings
    python benchmarks/ingress_death.py --haproxy serves  # with Serve's own
    ... --ingresses 1                                    # the only one is killed

Prints a Markdown table: outcomes by route, as ``ramp_client.py`` defines them; half of the requests or so are on the
replica that is killed.
"""

import argparse
import asyncio
import os
import random
import signal
import time
from collections import Counter, defaultdict

import haproxy_mode

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--haproxy", choices=haproxy_mode.WHOSE)
parser.add_argument("--ingresses", type=int, default=2)
parser.add_argument("--deaths", type=int, default=3)
given = parser.parse_args()
if given.haproxy:  # before Ray starts, on every node
    haproxy_mode.turn_on(os.environ, given.haproxy)

import httpx  # noqa: E402
from ramp_client import ROUTES, Answer, ask, some_text  # noqa: E402
from ramp_cluster import RampCluster, deploy_config, ramp_cluster, wait_until  # noqa: E402

EACH = 6
"""Requests of each route at a death."""
SLOW = {"thinker": {"delay_ms": 60}, "talker": {"delay_ms": 20}}


def config() -> dict[str, object]:
    """One replica of each stage, as many of the ingress as given."""
    deploy = deploy_config()
    for stage in deploy["stages"].values():
        stage["deployment"] = {}
    deploy["ingress"] = {"grace_s": 5, "deployment": {"num_replicas": given.ingresses}}
    return deploy


async def death(ramp: RampCluster, rng: random.Random) -> list[Answer]:
    """Requests of every route, some of which have shown something already; then a replica is killed."""

    async def one(route: str) -> Answer:
        async with httpx.AsyncClient(base_url=ramp.url, timeout=60) as client:  # each its own, as users are
            return await ask(client, route, some_text(rng, 40), faults=SLOW)  # type: ignore[arg-type]

    tasks = [asyncio.create_task(one(route)) for route in ROUTES for _ in range(EACH)]
    await asyncio.sleep(1.5)
    os.kill(rng.choice(ramp.pids("ingress")), signal.SIGKILL)
    return await asyncio.gather(*tasks)


async def measure(ramp: RampCluster) -> None:
    rng, answers = random.Random(1), list[Answer]()
    for _ in range(given.deaths):
        answers += await death(ramp, rng)
        back = lambda: len(ramp.pids("ingress")) == given.ingresses  # noqa: E731
        if not await asyncio.to_thread(wait_until, back, 60):
            raise RuntimeError("the ingress did not come back within 60 s")
        ready = lambda: httpx.get(f"{ramp.url}/ready").status_code == 200  # noqa: E731
        if not await asyncio.to_thread(wait_until, ready, 60):
            raise RuntimeError("ramp was not ready again within 60 s")
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for answer in answers:
        table[answer.route][answer.outcome] += 1
    print("| route | outcomes | what was said |\n|---|---|---|")
    for route, outcomes in table.items():
        said = Counter(a.detail for a in answers if a.route == route and a.outcome not in ("right", "cut"))
        cell = "; ".join(f"{number} x {detail}" for detail, number in said.items())
        print(f"| {route} | {', '.join(f'{n} {o}' for o, n in outcomes.most_common())} | {cell} |")


if __name__ == "__main__":
    with ramp_cluster(1, config()) as running:
        began = time.monotonic()
        asyncio.run(measure(running))
        print(f"\n{time.monotonic() - began:.0f} s")
