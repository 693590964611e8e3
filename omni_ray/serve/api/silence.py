"""Idle deadlines per kind of output: a stream that talks is never cut by a clock, one that fell silent is."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from omni_ray.config.ingress import IdleTimeouts
from omni_ray.engine.types import Finish
from omni_ray.errors import StageTimeoutError
from omni_ray.serve.events import OutputEvent
from omni_ray.serve.planner import Plan


async def watched(
    events: AsyncGenerator[OutputEvent, None], plan: Plan, limits: IdleTimeouts
) -> AsyncGenerator[OutputEvent, None]:
    """``events``, unless a kind of output falls silent before its end (C36).

    A kind lives as long as it, or whatever it is made from, gives signs of life: sound need not come while text does.
    Only time spent waiting here counts, so a slow reader is no silence. Before the first event the stages' own
    deadlines apply.

    Raises:
        StageTimeoutError: naming the kind.
    """
    kinds = {stage: kind for kind, stage in plan.outputs}
    sources = {stage: plan.upstream(stage) for stage in kinds}
    silent: dict[str, float] | None = None  # seconds of each stage that has not finished; None before the first event
    loop = asyncio.get_running_loop()
    async with aclosing(events):
        while True:
            left = {stage: limits.of(kinds[stage]) - seconds for stage, seconds in (silent or {}).items()}
            began = loop.time()
            try:
                async with asyncio.timeout(min(left.values(), default=None)):
                    event = await anext(events)
            except StopAsyncIteration:
                return
            except TimeoutError:
                kind = kinds[min(left, key=lambda stage: left[stage])]
                raise StageTimeoutError(f"no {kind} came for {limits.of(kind):g} s") from None
            if silent is None:
                silent = dict.fromkeys(kinds, 0.0)
            waited = loop.time() - began
            silent = {s: 0.0 if event.stage in sources[s] else seconds + waited for s, seconds in silent.items()}
            if isinstance(event.output, Finish):
                silent.pop(event.stage, None)
            yield event
