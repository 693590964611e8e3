"""The thinker's engine: the autoregressive engine, whose text rows also give out a latent row for every token.

A token's row exists once the token itself was computed, in the step that draws the next one. So row k comes with token
k + 1, and the last token that is drawn, which nobody computes, has none: what upstream's talker hears, too.

The record of a request that goes on after a death holds tokens and no rows. So this engine makes every step again, and
takes the record's tokens in place of what it draws.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from omni_ray.engine.ar import AREngine
from omni_ray.engine.ar_model import ARModel
from omni_ray.engine.ar_row import Advance, Row
from omni_ray.engine.ar_text import Drawn, TextSteps
from omni_ray.engine.base import EngineContext
from omni_ray.engine.options import AROptions
from omni_ray.engine.sampler import NOT_A_NUMBER
from omni_ray.engine.types import LatentChunk


class LatentTextModel(ARModel):
    """An ``ARModel`` that keeps the latent row of what it computed last in each slot."""

    @abstractmethod
    def take_row(self, slot: int) -> Sequence[LatentChunk]:
        """The row of the token that the last step computed in this slot, once; none before the first step."""


class LatentSteps(TextSteps):
    """``TextSteps`` with a row beside each token; see the module for how a record is taken in."""

    model: LatentTextModel

    def __init__(self, model: LatentTextModel, options: AROptions) -> None:
        super().__init__(model, options)
        self.exact = True

    def set_up(self, row: Row) -> None:
        """As ``TextSteps``; an end on record is found again, because its rows are not there."""
        super().set_up(row)
        if row.resume is not None:
            row.resume = replace(row.resume, finish=None)

    def advance(self, row: Row, result: Drawn) -> Advance:
        """The row of the token before, then what the new one gives."""
        known = () if row.resume is None else row.resume.token_ids
        if result.token != NOT_A_NUMBER and row.count < len(known):
            result = replace(result, token=known[row.count])
        rows = self.model.take_row(row.slot)
        made = super().advance(row, result)
        return Advance([*rows, *made.outputs], made.reason)


class LatentTextEngine(AREngine):
    """See ``AREngine``; computes a ``LatentTextModel``. A row comes before the token that made it known."""

    def __init__(self, context: EngineContext) -> None:
        super().__init__(context)
        options, model = context.options, self._model
        assert isinstance(options, AROptions)
        assert isinstance(model, LatentTextModel)
        self._steps = LatentSteps(model, options)
        self._decode_loop = self._loop_of(self._steps, options)
