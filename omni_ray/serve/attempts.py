"""How a request outlives the replicas it runs on: retried while nothing was shown, taken over after that.

One ``Attempts`` per request, in the ingress, which alone decides: a retry in every hop would let one request kill a
stage many times over. A takeover restarts the whole chain with what every stage had made (``records``); stages make it
again without being heard, so that the client sees one stream without a gap.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from typing import Final

from omni_ray.config.ingress import IngressConfig
from omni_ray.engine.types import Finish
from omni_ray.errors import NotReadyError, ReplicaDiedError, SaturatedError, StageTimeoutError, TakeoverRefusedError
from omni_ray.serve.events import Envelope, Event, Opened, OutputEvent, Recorded, RecordEvent
from omni_ray.serve.records import MAX_RECORD_BYTES, StageRecord, recordable, total_bytes

logger = logging.getLogger("ray.serve")

LINGER_S: Final = 1.0
"""How long a request still counts as a replica's tenant after it left: all that one death hits must see each other."""
POISONED: Final = 2
"""A request that was alone on this many replicas when they died is itself the likely cause."""
WAIT_FOR_ROOM_S: Final = 0.25


class Tenants:
    """Which of this ingress replica's requests run on which stage replica."""

    def __init__(self) -> None:
        self._on: Counter[tuple[str, Hashable]] = Counter()

    def enter(self, replica: str, request: Hashable) -> None:
        """``request`` runs on ``replica``."""
        self._on[replica, request] += 1

    def leave(self, replica: str, request: Hashable) -> None:
        """It no longer does; others see it for ``LINGER_S`` more."""
        asyncio.get_running_loop().call_later(LINGER_S, self._forget, (replica, request))

    def _forget(self, key: tuple[str, Hashable]) -> None:
        self._on[key] -= 1
        if not self._on[key]:
            del self._on[key]

    def alone(self, replica: str, request: Hashable) -> bool:
        """Whether no other request of ours runs on ``replica``, or did a moment ago."""
        return not any(on == replica and who != request for on, who in self._on)


class Patience:
    """How long faults may keep one request silent, all its attempts together: each alone may be short of its deadline.

    Attributes:
        seconds: all of it.
        spent_s: from the last sign of life to the end of an attempt, or of a wait, that came to nothing, summed up.
    """

    def __init__(self, seconds: float, spent_s: float = 0.0) -> None:
        self.seconds = seconds
        self.spent_s = spent_s
        self._since = time.monotonic()

    @property
    def left_s(self) -> float:
        """Seconds until it is over, if nothing comes."""
        return self._since + self.seconds - self.spent_s - time.monotonic()

    def renew(self) -> None:
        """Something came; what was spent stays so."""
        self._since = time.monotonic()

    def spend(self) -> None:
        """The silence so far was in vain."""
        now = time.monotonic()
        self.spent_s += now - self._since
        self._since = now


class Attempts:
    """The attempts of one request.

    Attributes:
        envelope: of the attempt that runs or is to run.
        unfinished: stages of the plan's outputs that have not finished; without any, the client has its whole answer.
        shown: whether the client may have seen something.
        patience: of all attempts together.
    """

    def __init__(self, config: IngressConfig, tenants: Tenants, envelope: Envelope, patience: Patience) -> None:
        self.envelope = replace(envelope, records=config.takeover)
        self.unfinished = {stage for _, stage in envelope.plan.outputs}
        self._tenants = tenants
        self._retries = 1 if config.retry else 0
        self._takeovers = config.max_takeovers if config.takeover else 0
        self.patience = patience
        self._recovery_wait_s = config.recovery_wait_s
        self.shown = False
        self._alone = 0
        self._was_silent = False
        self._opened: dict[str, Opened] = {}  # of this attempt
        self._known: dict[str, Opened] = {}  # of any
        self._records: dict[str, StageRecord] = {}

    def take(self, event: Event) -> OutputEvent | None:
        """Note an event; the part of it that the client has not seen, if there is one.

        Raises:
            StageFailedError: it does not follow what came before.
        """
        if isinstance(event, Opened):
            self._opened[event.stage] = self._known[event.stage] = event
            self._tenants.enter(event.replica, self._who)
            return None
        if not isinstance(event, OutputEvent | RecordEvent):
            return None
        self.shown |= isinstance(event, OutputEvent)
        if isinstance(event, OutputEvent) and isinstance(event.output, Finish):
            self.unfinished.discard(event.stage)
        if not self.envelope.records:
            return event if isinstance(event, OutputEvent) else None
        record = self._records.setdefault(event.stage, StageRecord(event.stage))
        new = record.new(event.output)
        if self._takeovers and recordable(event.output) and total_bytes(self._records.values()) > MAX_RECORD_BYTES:
            logger.warning("request %s is too long to be taken over", self._who)
            self._takeovers = 0
            for kept in self._records.values():
                kept.forget()
        if new is None or isinstance(event, RecordEvent):
            return None
        return event if new is event.output else OutputEvent(event.stage, new)

    def again(self, error: ReplicaDiedError | StageTimeoutError) -> None:
        """A replica died, or is silent: prepare the next attempt. A second silence is the request's own.

        Raises:
            ReplicaDiedError, StageTimeoutError: ``error``: there is none.
            TakeoverRefusedError: the same, because a stage's engine cannot go on with a request.
        """
        self.patience.spend()
        if self.patience.left_s <= 0:
            raise error
        if isinstance(error, StageTimeoutError):
            if self._was_silent:
                raise error
            self._was_silent = True
        elif (
            died := self._opened.get(error.stage)
        ) is not None:  # else it never ran there: the replica was dying when it was chosen
            self._alone += self._tenants.alone(died.replica, self._who)
        if not self.shown:
            if not self._retries:
                raise error
            self._retries -= 1
            logger.warning("request %s is tried once more: %s", self._who, error)
        else:
            if not self._takeovers or self._alone >= POISONED:
                raise error
            if fixed := [name for name, opened in self._known.items() if not opened.resumable]:
                raise TakeoverRefusedError(f"{error.message}, and stage {fixed[0]} cannot go on elsewhere") from error
            self._takeovers -= 1
            logger.warning("request %s is taken over: %s", self._who, error)
        self._next()

    async def wait(self, error: SaturatedError) -> None:
        """A stage had no room, or no replica: wait for some.

        Raises:
            SaturatedError: ``error``: patience is over; or there was no room and nothing was shown yet, so that the
                client may come again.
        """
        self.patience.spend()
        comes_back = isinstance(error, NotReadyError) and self.patience.spent_s < self._recovery_wait_s
        if self.patience.left_s <= 0 or not (self.shown or comes_back):
            raise error
        await asyncio.sleep(WAIT_FOR_ROOM_S)
        self._next()

    def close(self) -> None:
        """The request is over."""
        for opened in self._opened.values():
            self._tenants.leave(opened.replica, self._who)
        self._opened = {}

    @property
    def _who(self) -> str:
        return self.envelope.request.request_id

    def _next(self) -> None:
        self.close()
        resume = {}
        if self.shown:
            for name, record in self._records.items():
                record.restart()
                resume[name] = Recorded(self._known[name].version, record.resume())
        request = replace(self.envelope.request, attempt=self.envelope.request.attempt + 1)
        self.envelope = replace(self.envelope, request=request, resume=resume)
