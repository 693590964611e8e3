"""Which stages answer. Each ingress replica pings them all, and so learns whether the application was ever ready.

That decides how long a request waits for a stage without replicas: one that is still loading for the first time may
take minutes, one that was up comes back soon. A new ingress replica cannot have seen it, so the news travels with the
pings: whoever asks says what it knows, and every stage's replica remembers and answers with it.
"""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from ray import serve

from omni_ray.serve.stage_client import StageClient
from omni_ray.serve.status import ApplicationView, applications

logger = logging.getLogger("ray.serve")

PING_TIMEOUT_S = 1.0
PING_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether every stage answers; ``waiting`` maps each stage that does not to the reason."""

    ready: bool
    waiting: Mapping[str, str]


class Pings:
    """Asks every stage, round after round, from its construction until ``stop``.

    Attributes:
        readiness: the last round's result, at most a few seconds old.
        was_ready: whether the application has ever been ready, as far as anybody knows who was asked.
    """

    def __init__(self, clients: Mapping[str, StageClient], told: Callable[[Mapping[str, bool]], None]) -> None:
        """``told`` hears after each round which stages answer."""
        self._clients = clients
        self._told = told
        self._met: set[str] = set()
        self._missed: defaultdict[str, float] = defaultdict(float)
        self._news = asyncio.Condition()
        self.readiness = Readiness(False, {name: "not asked yet" for name in clients})
        self.was_ready = False
        self._status: asyncio.Future[dict[str, ApplicationView]] | None = None
        self._status_thread = ThreadPoolExecutor(1, thread_name_prefix="serve-status")
        self._task = asyncio.get_running_loop().create_task(self._keep_asking())

    def unmet(self, stages: Collection[str]) -> list[str]:
        """Those of ``stages`` that have not answered this ingress replica yet."""
        return [name for name in stages if name not in self._met]

    def missed(self, stages: Collection[str], since: float) -> bool:
        """Whether one of ``stages`` left a ping unanswered after ``since`` (the loop's time)."""
        return any(self._missed[name] >= since for name in stages)

    async def news(self, timeout_s: float) -> None:
        """Return when a stage has answered for the first time or ``was_ready`` became true, or after ``timeout_s``."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s), self._news:
                await self._news.wait()

    async def _keep_asking(self) -> None:
        while True:
            knew = self.was_ready
            try:
                readiness = await self._ask()
                if self.was_ready and not knew:  # the stages shall know before anybody relies on it
                    readiness = await self._ask()
                self.readiness = readiness
            except Exception:  # whatever it is: not knowing is not being ready, and the next round may know
                logger.exception("asking the stages failed")
                self.readiness = Readiness(False, {"ingress": "asking the stages failed"})
            waiting = self.readiness.waiting
            self._told({name: name not in waiting for name in self._clients})
            await asyncio.sleep(PING_EVERY_S / 8 if self.unmet(self._clients) else PING_EVERY_S)

    async def _ask(self) -> Readiness:
        answers = await asyncio.gather(*map(self._ping, self._clients), return_exceptions=True)
        waiting = {name: str(a) for name, a in zip(self._clients, answers, strict=True) if a is not None}
        return Readiness(not waiting, await self._with_status(waiting) if waiting else {})

    async def _ping(self, name: str) -> None:
        """One stage; what it says counts at once, however long the others take."""
        try:
            was_ready = await self._clients[name].ping(PING_TIMEOUT_S, self.was_ready)
        except Exception:
            self._missed[name] = asyncio.get_running_loop().time()
            raise
        is_new = name not in self._met
        self._met.add(name)
        was_ready |= not self.unmet(self._clients)
        if is_new or (was_ready and not self.was_ready):
            self.was_ready |= was_ready
            async with self._news:
                self._news.notify_all()

    async def _with_status(self, waiting: dict[str, str]) -> dict[str, str]:
        """Serve's own words for each stage that does not answer, when the controller can be asked.

        The call blocks for as long as the controller hangs, so it has a thread of its own and is never made twice.
        """
        if self._status is None:
            self._status = asyncio.get_running_loop().run_in_executor(self._status_thread, applications)
        try:
            async with asyncio.timeout(PING_TIMEOUT_S):
                known = await asyncio.shield(self._status)
        except TimeoutError:
            return waiting
        except Exception as error:  # the controller may be gone; that alone never makes us unready
            logger.debug("the controller did not answer: %r", error)
            self._status = None
            return waiting
        self._status = None
        ours = known.get(serve.get_replica_context().app_name)
        if ours is None:
            return waiting
        said = {name: f" ({d.status.value}: {_first_line(d.message)})" for name, d in ours.deployments.items()}
        return {name: reason + said.get(name, "") for name, reason in waiting.items()}

    def stop(self) -> None:
        """Ask no more."""
        self._task.cancel()
        self._status_thread.shutdown(wait=False)


def _first_line(message: str) -> str:
    """What went wrong without the traceback, which is for the log."""
    lines = [line for line in message.strip().splitlines() if line.strip()]
    return lines[0][:160] if lines else "no message"
