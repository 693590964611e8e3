"""Faults of every kind, one every few seconds, under live streams of ``ramp``: who noticed, and was any sample wrong?

    python benchmarks/chaos.py                                # 10 minutes, 24 streams; writes chaos.md
    python benchmarks/chaos.py --seconds 30 --seed 5 --out -  # a short one, to standard output

A request counts as touched if it was alive while a fault hurt the processes that all requests share: at the moment of
a kill; for a frozen node, until it is gone; for a request that hangs or kills its stage, until that request's end. All
others must be answered right: those too that come before what was killed is back, and those that are alive while the
controller dies or all replicas are replaced by a redeploy. Requests that carry a fault of their own are counted apart.
"""

import argparse
import asyncio
import contextlib
import os
import platform
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import ray
from ramp_client import ROUTES, VOICES, Answer, ask, body, some_text
from ramp_cluster import STAGES, RampCluster, deploy_config, ramp_cluster

DEADLINE_S = 60.0
FROZEN_S = 30.0
"""How long a frozen node stays before it is gone for good: longer than it takes to be missed."""
ACT_S = 150.0
"""A fault that cannot be done in this time is given up, and listed as not done."""
PACE_MS = 20.0
"""A code frame of 80 ms every 20 ms: streams last seconds, at four times real time."""


@dataclass
class Fault:
    """What was done and when; ``until`` is when it was over. ``hurts`` says whether requests of others may notice."""

    kind: str
    at: float
    hurts: bool
    until: float = 0.0


@dataclass
class Chaos:
    """The run."""

    running: RampCluster
    client: httpx.AsyncClient
    rng: random.Random
    started: float = field(default_factory=time.monotonic)
    answers: list[Answer] = field(default_factory=list)
    own: defaultdict[str, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    faults: list[Fault] = field(default_factory=list)
    pace: float = PACE_MS
    replicas: int = 2
    only: tuple[str, ...] = ()

    async def kill_replica(self) -> None:
        """SIGKILL one replica of a stage."""
        await self._kill(self.rng.choice(STAGES))

    async def kill_ingress(self) -> None:
        """SIGKILL one ingress replica."""
        await self._kill("ingress")

    async def _kill(self, deployment: str) -> None:
        pids = await asyncio.to_thread(self.running.pids, deployment)
        if len(pids) > 1:  # one must be left, or there is nobody to take over
            os.kill(self.rng.choice(pids), signal.SIGKILL)

    async def kill_controller(self) -> None:
        """SIGKILL Serve's controller; Ray starts another."""
        await asyncio.to_thread(self.running.kill, "ray::ServeController")

    async def lose_node(self) -> None:
        """A raylet dies with all its replicas; another one joins first, so that there is room."""
        self.running.add_worker()  # not in a thread: Ray sets signal handlers, and the listeners can wait two seconds
        self.running.lose_worker()

    async def freeze_node(self) -> None:
        """A raylet and all its replicas stop, and their sockets stay open: nobody is told. It never comes back."""
        self.running.add_worker()
        node = self.running.workers[0]
        self.running.signal_worker(node, signal.SIGSTOP)
        await asyncio.sleep(FROZEN_S)
        self.running.lose_worker()

    async def poison(self) -> None:
        """A request that kills every process that computes it."""
        stage = self.rng.choice(STAGES)
        await self._own("poison", {stage: {"kill_at": self.rng.randrange(3)}})

    async def hang(self) -> None:
        """A request whose computation never returns."""
        await self._own("hang", {self.rng.choice(STAGES): {"hang_at": self.rng.randrange(3)}})

    async def fail(self) -> None:
        """Requests whose computation raises."""
        await asyncio.gather(*(self._own("fail", {stage: {"fail_at": 1}}) for stage in STAGES))

    async def nan(self) -> None:
        """A request whose sound becomes NaN."""
        await self._own("nan", {"code2wav": {"nan_at": self.rng.randrange(3)}})

    async def _own(self, kind: str, faults: dict[str, Any]) -> None:
        route = self.rng.choice(ROUTES)
        self.own[kind].append(await ask(self.client, route, some_text(self.rng, 8), "a", DEADLINE_S, faults))

    async def hang_up(self) -> None:
        """Ten clients leave at random moments, before the first byte too."""

        async def leave() -> None:
            path, sent = body(self.rng.choice(ROUTES), some_text(self.rng, 40), "a", None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.rng.uniform(0, 1.5)), self.client.stream("POST", path, json=sent) as r:
                    async for _ in r.aiter_raw():
                        pass

        await asyncio.gather(*(leave() for _ in range(10)))

    async def abandon_uploads(self) -> None:
        """Five clients leave in the middle of their body."""
        url = httpx.URL(self.running.url)
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        for _ in range(5):
            _, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(f'{head}Content-Length: 1000\r\n\r\n{{"model":'.encode())
            await writer.drain()
            writer.transport.abort()

    async def garbage(self) -> None:
        """Bodies that are no request."""
        for sent in (b"", b"{", b"\xff" * 1000, b"[" * 10_000, b'{"model":"ramp","input":5}', b"null"):
            response = await self.client.post("/v1/audio/speech", content=sent)
            if response.status_code not in (400, 404):
                self.own["garbage"].append(Answer("speech", 0, 0, "untold", f"{sent[:20]!r}: {response.status_code}"))

    async def read_slowly(self) -> None:
        """A client that takes its time with every piece."""
        path, sent = body("speech", some_text(self.rng, 40), "a", None)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(4), self.client.stream("POST", path, json=sent) as response:
                async for _ in response.aiter_raw(2000):
                    await asyncio.sleep(0.2)

    async def redeploy(self) -> None:
        """Another pace of the talker: all replicas are replaced while they serve."""
        self.pace = PACE_MS + self.rng.random()
        await self._change()

    async def scale(self) -> None:
        """Three replicas of every stage, or two again."""
        self.replicas = 5 - self.replicas
        await self._change()

    async def _change(self) -> None:
        config = deploy_config(pace_ms=self.pace)
        for stage in STAGES:
            deployment = config["stages"][stage]["deployment"]
            config["stages"][stage]["deployment"] = {**deployment, "num_replicas": self.replicas}
        await asyncio.to_thread(self.running.deploy, config, False)

    def kinds(self) -> list[tuple[Callable[[], Awaitable[None]], bool]]:
        """Every kind of fault, and whether others may notice it."""
        hurting = (
            self.kill_replica, self.kill_ingress, self.lose_node, self.freeze_node, self.poison, self.hang,
        )  # fmt: skip
        mild = (
            self.kill_controller, self.fail, self.nan, self.hang_up, self.abandon_uploads, self.garbage,
            self.read_slowly, self.redeploy, self.scale,
        )  # fmt: skip
        every = [*((f, True) for f in hurting), *((f, False) for f in mild)]
        return [(f, hurts) for f, hurts in every if not self.only or f.__name__ in self.only]

    async def listen(self, stop: asyncio.Event) -> None:
        """One client: request after request."""
        while not stop.is_set():
            text, voice = some_text(self.rng, self.rng.randint(3, 40)), self.rng.choice(VOICES)
            self.answers.append(await ask(self.client, self.rng.choice(ROUTES), text, voice, DEADLINE_S))

    async def torment(self, stop: asyncio.Event, every_s: float) -> None:
        """One fault after the other; every kind comes before any comes again."""
        left: list[tuple[Callable[[], Awaitable[None]], bool]] = []
        tasks: set[asyncio.Task[None]] = set()
        while not stop.is_set():
            if not left:
                left = self.kinds()
                self.rng.shuffle(left)
            act, hurts = left.pop()
            fault = Fault(act.__name__, time.monotonic(), hurts)
            self.faults.append(fault)
            task = asyncio.create_task(self._do(act, fault))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), every_s)
        await asyncio.gather(*tasks)

    async def _do(self, act: Callable[[], Awaitable[None]], fault: Fault) -> None:
        try:
            async with asyncio.timeout(ACT_S):
                await act()
        except Exception as error:  # a fault that could not be done is no result, but must not end the run
            fault.kind += f" (not done: {error!r:.80})"
        fault.until = time.monotonic()

    def touched(self, answer: Answer) -> bool:
        """Whether a fault hurt the shared processes while the request was alive."""
        return any(f.hurts and f.at <= answer.ended and f.until >= answer.started for f in self.faults)


async def run(
    running: RampCluster, seconds: float, streams: int, every_s: float, seed: int, only: tuple[str, ...]
) -> Chaos:
    """Listen and torment for ``seconds``, then let every request end."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=running.url, timeout=DEADLINE_S, limits=limits) as client:
        chaos = Chaos(running, client, random.Random(seed), only=only)
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(seconds, stop.set)
        show = asyncio.create_task(progress(chaos, seconds))
        await asyncio.gather(*(chaos.listen(stop) for _ in range(streams)), chaos.torment(stop, every_s))
        show.cancel()
        return chaos


async def progress(chaos: Chaos, seconds: float) -> None:
    """A line every ten seconds."""
    started = time.monotonic()
    while True:
        await asyncio.sleep(10)
        counts = Counter(a.outcome for a in chaos.answers)
        print(f"{time.monotonic() - started:4.0f} of {seconds:.0f} s: {dict(counts)}", file=sys.stderr, flush=True)


def report(chaos: Chaos, seconds: float, streams: int, seed: int, left: int) -> tuple[str, bool]:
    """The page, and whether everything that is promised held."""
    others = [a for answers in chaos.own.values() for a in answers]
    everybody = [*chaos.answers, *others]
    total = len(chaos.answers)
    right = sum(a.outcome == "right" for a in chaos.answers)
    touched = [a for a in chaos.answers if chaos.touched(a)]
    untouched = [a for a in chaos.answers if not chaos.touched(a)]
    lines = [
        "# Chaos",
        "",
        f"`python benchmarks/chaos.py --seed {seed}`: {seconds:.0f} s, {streams} concurrent streams of `ramp` over "
        f"HTTP, {len(chaos.faults)} faults, takeover on. {os.cpu_count()} CPU cores, {platform.machine()}, Python "
        f"{platform.python_version()}, Ray {ray.__version__}; three worker raylets on one machine.",
        "",
        f"Availability: {100 * right / max(total, 1):.3f} % of {total} requests were answered right, every byte. "
        f"{_longest(everybody)}",
        "",
        "| requests | " + " | ".join(("all", *("right", "wrong", "told", "cut", "untold", "hung"))) + " |",
        "|---|" + "---|" * 7,
    ]
    rows: list[tuple[str, list[Answer]]] = [
        ("all", chaos.answers),
        ("not touched by a fault", untouched),
        ("touched", touched),
        *((f"with a fault of their own: {kind}", answers) for kind, answers in sorted(chaos.own.items())),
    ]
    for name, answers in rows:
        counts = Counter(a.outcome for a in answers)
        outcomes = ("right", "wrong", "told", "cut", "untold", "hung")
        lines.append(f"| {name} | {len(answers)} | " + " | ".join(str(counts[o]) for o in outcomes) + " |")
    lines += ["", "| fault | times |", "|---|---|"]
    lines += [f"| {kind} | {count} |" for kind, count in sorted(Counter(f.kind for f in chaos.faults).items())]
    if bad := [a for a in chaos.answers if a.outcome != "right"]:
        lines += ["", "| not right | route | outcome | what the client saw | times |", "|---|---|---|---|---|"]
        same = Counter(("touched" if chaos.touched(a) else "UNTOUCHED", a.route, a.outcome, a.detail) for a in bad)
        lines += [f"| {' | '.join(what)} | {count} |" for what, count in sorted(same.items())]
    odd = [a for a in untouched if a.outcome != "right"] + [a for a in (*touched, *others) if not _is_proper(a)]
    if odd:
        at = chaos.started
        lines += [
            "",
            *(f"- {a.started - at:.1f} to {a.ended - at:.1f} s: {a.route}, {a.outcome} {a.detail}" for a in odd),
        ]
        lines += ["", *(f"- {f.at - at:.1f} to {f.until - at:.1f} s: {f.kind}" for f in chaos.faults)]
    held = not odd and left == 0
    lines += [
        "",
        f"Requests still in a stage 5 s after the last answer: {left}.",
        "",
        f"{'Held' if held else 'NOT held, see above'}: no wrong sample, no request hung, a proper error for every one "
        "that failed (raw sound is cut), every untouched one right, nothing left over.",
    ]
    return "\n".join(lines) + "\n", held


def _is_proper(answer: Answer) -> bool:
    """Whether what failed said so, as far as HTTP can."""
    return answer.outcome in ("right", "told") or (answer.outcome, answer.route) == ("cut", "speech")


def _longest(answers: list[Answer]) -> str:
    """How near anybody came to hang."""
    seconds = {
        what: max((a.ended - a.started for a in answers if (a.outcome == "right") is right), default=0.0)
        for what, right in (("right", True), ("other", False))
    }
    return f"The longest right answer took {seconds['right']:.1f} s, the longest other one {seconds['other']:.1f} s."


def main() -> int:
    """Parse, run, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--every", type=float, default=5, metavar="S", help="seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", default=(), metavar="FAULT", help="kinds of faults (default: all)")
    parser.add_argument(
        "--out", default=str(Path(__file__).with_name("chaos.md")), help="file, or - (default: chaos.md)"
    )
    args = parser.parse_args()
    with ramp_cluster(3, deploy_config(pace_ms=PACE_MS)) as running:
        chaos = asyncio.run(run(running, args.seconds, args.streams, args.every, args.seed, tuple(args.only)))
        time.sleep(5)
        page, held = report(chaos, args.seconds, args.streams, args.seed, running.at_work())
    if args.out == "-":
        print(page)
    else:
        Path(args.out).write_text(page)
        print(f"wrote {args.out}", file=sys.stderr)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
