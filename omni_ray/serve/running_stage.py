"""One stage at work in this process: its engine, its runs, and what is counted of them."""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import NoReturn

from omni_ray.engine.base import Engine, EngineStats
from omni_ray.errors import EngineDiedError, OmniRayError, ReplicaDiedError, SaturatedError, StageFailedError
from omni_ray.serve.events import Caller, Envelope, Event, Saturated
from omni_ray.serve.lifeline import ProducerEnd
from omni_ray.serve.logs import stage_context
from omni_ray.serve.meters import GAUGES_EVERY_S, Labels, StageMeters
from omni_ray.serve.ref_collector import RefCollector
from omni_ray.serve.slack import AT_EASE_S, Report, Tuning, load_of
from omni_ray.serve.specs import StageSpec
from omni_ray.serve.stage_client import Client
from omni_ray.serve.stage_parts import StageParts, start_engine
from omni_ray.serve.stage_run import StageRun
from omni_ray.serve.tracing import Tracing
from omni_ray.serve.window import Window

logger = logging.getLogger("ray.serve")

STARTED_S = 1.0
"""A stream that has just begun to sound has no lead yet; that presses nobody."""


@dataclass(frozen=True, slots=True)
class StageState:
    """What a stage knows of itself, for tests and ``omni-ray top``. All counters but totals are zero when idle.

    ``leads`` are of the live streams that have begun to sound; ``load`` is as autoscaling sees it (``slack.load_of``).
    """

    stage: str
    replica: str
    ongoing: int
    engine: EngineStats
    started: int
    finished: int
    refused: int
    failed: int
    cancelled: int
    messages: int
    leads: tuple[float, ...] = ()
    held_refs: int = 0
    load: float = 0.0


class _ConsumerGone(ReplicaDiedError):
    """The lifeline broke: the consumer's process is gone, or at least out of reach."""


class RunningStage:
    """A started engine with everything that surrounds it. ``start`` makes one."""

    def __init__(
        self, parts: StageParts, labels: Labels, tuning: Tuning, tracing: Tracing | None, collector: RefCollector
    ) -> None:
        self._parts = parts
        self._engine: Engine = parts.engine
        self._name = parts.stage.name
        self._replica = labels.replica
        self._tuning = tuning
        self._tracing = tracing
        self._collector = collector
        self._meters = StageMeters(labels)
        self._runs: set[StageRun] = set()
        self._ongoing: Counter[tuple[str, int]] = Counter()
        self._totals: Counter[str] = Counter()
        self._gauges = asyncio.get_running_loop().create_task(self._set_gauges())

    @classmethod
    async def start(
        cls,
        spec: StageSpec,
        labels: Labels,
        clients: Mapping[str, Client],
        tuning: Tuning,
        collector: RefCollector,
    ) -> "RunningStage":
        """Load the stage's model and start its engine.

        Args:
            spec: what it is built from.
            labels: of its metrics and spans.
            clients: to the stages that it may call.
            tuning: by which it says how much it has to do.
            collector: of this process.
        """

        def progress(line: str) -> None:
            logger.info("%s: %s", spec.stage, line)

        tracing = Tracing(labels) if spec.observe.tracing else None
        parts = StageParts.of(spec, await start_engine(spec, progress), clients, labels.replica)
        return cls(parts, labels, tuning, tracing, collector)

    async def run(
        self, envelope: Envelope, caller: Caller, local: Window | None = None
    ) -> AsyncGenerator[list[Event], None]:
        """One request: lists of events until its end. Cancelling it stops everything upstream of it too.

        Args:
            envelope: the request.
            caller: who asks for it.
            local: the stream's window, if the caller is in this process: latents then stay as they are.
        """
        key, outcome = envelope.request.key, "cancelled"
        end = ProducerEnd(self._parts.streaming.window_bytes()) if caller.lifeline is not None else None
        trace = None
        if self._tracing is not None:
            trace = self._tracing.begin(*key, envelope.traceparent)
            envelope = replace(envelope, traceparent=trace.traceparent)
        run = StageRun(self._parts, envelope, end, trace, local)
        tasks = [asyncio.create_task(run.go(), context=stage_context(self._name))]
        if end is not None and caller.lifeline is not None:
            tasks.append(asyncio.create_task(end.follow(caller.lifeline)))
            end.lost.add_done_callback(lambda _: run.outbox.close(_ConsumerGone(f"{caller.consumer} is gone")))

        async def taken() -> None:
            if end is not None:
                await end.taken()

        self._ongoing[key] += 1
        self._totals["started"] += 1
        self._runs.add(run)
        async with end.parting() if end is not None else nullcontext():
            try:
                async for batch in run.outbox.batches():
                    self._totals["messages"] += 1
                    if end is not None:
                        end.message()
                    yield batch
                if end is not None:
                    await end.drained()
                outcome = "finished"
            except SaturatedError as error:
                outcome = "refused"
                yield [Saturated(self._name, error.message, error.retry_after_s)]
            except EngineDiedError as error:
                if error.stage == self._name:
                    _leave(error)
                await taken()
                raise
            except _ConsumerGone:
                raise  # to a consumer that lives and only lost its lifeline this is an error, never an end
            except OmniRayError:
                outcome = "failed"
                await taken()
                raise
            except Exception as error:
                outcome = "failed"
                await taken()
                logger.exception("stage %s failed, request %s", self._name, envelope.request.request_id)
                raise StageFailedError(f"stage {self._name} failed") from error
            finally:
                await self._end(run, end, tasks, outcome in ("finished", "refused"))
                self._totals[outcome] += 1
                self._runs.discard(run)
                self._meters.ended(outcome, run.watch)
                if trace is not None:
                    trace.end(run.watch, outcome)
                self._ongoing[key] -= 1
                if not self._ongoing[key]:
                    del self._ongoing[key]

    async def _end(
        self, run: StageRun, end: ProducerEnd | None, tasks: list[asyncio.Task[None]], complete: bool
    ) -> None:
        """Stop what is left of a run and let go of its refs."""
        for task in tasks:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
        if end is not None:
            end.release()
            end.lost.cancel()  # its callback knows the run, and the run knows the end: a cycle that holds refs
        if not complete:
            run.abandon()
        if run.refs_travel and (run.cut_off or not complete):
            self._collector.soon()

    async def check_health(self) -> None:
        """The engine's own. If that is dead, this process ends."""
        try:
            await self._engine.check_health()
        except EngineDiedError as error:
            _leave(error)

    def state(self) -> StageState:
        """Counters right now."""
        names = ("started", "finished", "refused", "failed", "cancelled", "messages")
        counts = {name: self._totals[name] for name in names}
        refs = sum(run.held()[0] for run in self._runs)
        ongoing, engine = self._ongoing.total(), self._engine.stats()
        load = load_of(self._report(engine), self._tuning)
        return StageState(
            self._name, self._replica, ongoing, engine, **counts, leads=self._leads(), held_refs=refs, load=load
        )

    def report(self) -> Report:
        """What autoscaling goes by."""
        return self._report(self._engine.stats())

    async def stop(self) -> None:
        """Free everything; running requests fail."""
        self._gauges.cancel()
        await self._engine.stop()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.stop)

    async def _set_gauges(self) -> None:
        while True:
            held = [run.held() for run in self._runs]
            try:
                stats = self._engine.stats()
            except Exception:  # a broken engine is the health check's affair; the next look may succeed
                logger.exception("asking the engine of stage %s for its state failed", self._name)
            else:
                refs, ref_bytes = sum(n for n, _ in held), sum(size for _, size in held)
                self._meters.now(stats, self._leads(), refs, ref_bytes, load_of(self._report(stats), self._tuning))
            await asyncio.sleep(GAUGES_EVERY_S)

    def _leads(self) -> tuple[float, ...]:
        now = time.monotonic()
        leads = (run.watch.playback.lead_s(now) for run in self._runs)
        return tuple(lead for lead in leads if lead is not None)

    def _report(self, stats: EngineStats) -> Report:
        now = time.monotonic()
        waited_for = (run.watch.playback for run in self._runs if run.waited_for())
        leads = [p.lead_s(now) or 0.0 for p in waited_for if p.first is not None and now - p.first > STARTED_S]
        return Report(
            busy=stats.running,
            queued=stats.queued,
            places=stats.max_num_seqs,
            oldest_wait_s=stats.oldest_wait_s,
            least_lead_s=min([AT_EASE_S, *leads]),
            cost=self._parts.effort.cost(),
        )


def _leave(error: EngineDiedError) -> NoReturn:
    """End this process: a replica without an engine must not be routed to until three health checks have failed."""
    logger.critical("%s; this replica ends", error)
    logging.shutdown()
    os._exit(1)
