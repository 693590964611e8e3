"""A request inside the autoregressive loop, and what the two kinds of models do differently with it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from omni_ray.engine.ar_model import Prepared, SlotModel
from omni_ray.engine.lead import Lead
from omni_ray.engine.options import AROptions
from omni_ray.engine.prompts import room_for_answer
from omni_ray.engine.resume import Resume
from omni_ray.engine.types import FinishReason, Output, Request


@dataclass(frozen=True, slots=True)
class Waiting:
    """Told to a row's owner: everything it fed is used up, ``items`` of them; the row waits for more."""

    items: int


News = Output | Exception | Waiting
Deliver = Callable[[Sequence[News]], None]
Mail = Sequence[tuple["Row", Sequence[News]]]
"""News by row, in order."""


@dataclass(slots=True, eq=False)
class Row:
    """One request in the loop. The owner sets the first five and may ``prepare`` it; then all others are the loop's.

    Attributes:
        prompt: what ``SlotModel.encode`` takes.
        deliver: takes the row's news, on the owner's side.
        resume: what the request's last attempt had made, if it goes on here.
        cancelled: set by ``DecodeLoop.cancel`` at any time; the row is gone before the next step.
        slot: its place in the model's KV cache, -1 before it has one.
        prepared: the prompt as the model computes it, ``length`` positions, ``computed`` of which are in the slot.
        count: tokens or frames made so far, at most ``limit``.
        recorded: how many of them the slot must take in before the next step; ``replayed`` of them are.
        state: what ``Steps`` keeps for the row.
        held: frames that were made and not given out yet, int64 [codebooks] each.
        early: items that were fed before the row had a slot. ``items`` counts all, ``units`` what they were worth.
        feed_ended: no item comes any more.
        lead: how far it is ahead of its listener; of no meaning for rows that make text.
    """

    request: Request
    prompt: Any
    deliver: Deliver
    resume: Resume | None = None
    cancelled: bool = False
    slot: int = -1
    prepared: Prepared = ()
    length: int = 0
    computed: int = 0
    count: int = 0
    limit: int = 0
    recorded: int = 0
    replayed: int = 0
    state: Any = None
    held: list[NDArray[np.int64]] = field(default_factory=list)
    early: list[Any] = field(default_factory=list)
    items: int = 0
    units: int = 0
    feed_ended: bool = False
    lead: Lead = field(init=False)

    def __post_init__(self) -> None:
        self.lead = Lead(self.request)

    @property
    def behind(self) -> bool:
        """Whether it must catch up with its record before it can step."""
        return self.replayed < self.recorded


@dataclass(slots=True)
class Letter:
    """What an owner tells the loop about a row: it is new, an item for it arrived, no more will, or it is cancelled."""

    row: Row
    kind: Literal["new", "item", "end", "cancel"]
    item: Any = None


@dataclass(slots=True)
class Advance:
    """What a step gave a row: outputs, and why the row is over, if it is."""

    outputs: list[Output] = field(default_factory=list)
    reason: FinishReason | None = None


class Steps(ABC):
    """One kind of model: how a row starts, when it may step, and what becomes of a step's result.

    A row with a ``resume`` takes its record in as it would take a prompt, many positions at once (``catch_up``). That
    rounds otherwise than the steps did, so with ``exact`` the row makes its steps again instead.
    """

    def __init__(self, model: SlotModel, options: AROptions) -> None:
        self.model = model
        self.max_model_len = options.max_model_len
        self.exact = options.deterministic

    def prepare(self, row: Row) -> None:
        """Encode the row's prompt and check its length.

        Raises:
            InvalidRequestError: the prompt leaves no room in ``max_model_len``.
        """
        row.prepared = self.model.encode(row.prompt)
        row.length = len(row.prepared)
        row.limit = room_for_answer(row.length, self.max_model_len)

    def join(self, row: Row) -> None:
        """Set the row up in its slot, prepared or not; raises what ``prepare`` does."""
        if not row.length:
            self.prepare(row)
        self.set_up(row)
        row.computed = self.model.begin(row.slot, row.prepared)

    @abstractmethod
    def set_up(self, row: Row) -> None:
        """Set the row's ``state``, and lower its ``limit`` from all the room there is to what it may take of it."""

    @abstractmethod
    def prefill(self, row: Row, end: int) -> Any:
        """Compute the prompt from ``row.computed`` up to ``end``."""

    @abstractmethod
    def prompt_done(self, row: Row, result: Any) -> Advance:
        """The whole prompt is computed; ``result`` is the last piece's."""

    def ready(self, row: Row) -> bool:
        """Whether the row can make a step now, but for what it has to catch up with."""
        return True

    @abstractmethod
    def catch_up(self, row: Row, end: int) -> None:
        """Take the record's tokens or frames ``row.replayed .. end - 1`` into the slot; the row is ``ready``."""

    def launch(self, rows: Sequence[Row]) -> None:  # noqa: B027 most models compute when they are asked for the result
        """Start what ``step`` of the same rows, which follows, may then have to wait for."""

    @abstractmethod
    def step(self, rows: Sequence[Row]) -> Sequence[Any]:
        """Make one step of rows in order of their slots; one result per row. Repeatable after it raised."""

    @abstractmethod
    def advance(self, row: Row, result: Any) -> Advance:
        """Take a step's result into the row."""

    def due(self, row: Row) -> list[Output]:
        """What the row made and may not hold back any longer; asked after every step, and often while it waits."""
        return []

    def rest(self, row: Row) -> list[Output]:
        """All that the row made and did not give out yet."""
        return []

    @abstractmethod
    def usage(self, row: Row) -> Any:
        """The ``Usage`` of a row that is over."""

    def feed(self, row: Row, item: Any) -> None:
        """An item arrived for a row that has a slot."""
        raise TypeError(f"{type(self.model).__name__} takes no input while it runs")

    def end_feed(self, row: Row) -> Advance:
        """No further item comes for a row that has a slot."""
        return Advance()

    @abstractmethod
    def evidence(self, result: Any) -> Tensor:
        """The numbers behind a step's result, for the self-test."""
