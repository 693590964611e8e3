"""Rows of a text model: the engine samples a token from logits and gives out the text that is certain."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from omni_ray.engine.ar_model import ARModel
from omni_ray.engine.ar_row import Advance, Row, Steps
from omni_ray.engine.detokenizer import Detokenizer
from omni_ray.engine.sampler import Sampler
from omni_ray.engine.types import FinishReason, PromptChunk, TextChunk, Usage


@dataclass(slots=True)
class TextState:
    """What a text row keeps: ``last`` token drawn; ``seen`` int64 [n] where the repetition penalty needs it."""

    sampler: Sampler
    text: Detokenizer
    last: int = 0
    seen: Tensor | None = None


class TextSteps(Steps):
    """See ``Steps``. ``max_tokens`` is clamped to what ``max_model_len`` leaves."""

    model: ARModel

    def set_up(self, row: Row) -> None:
        """See ``Steps.set_up``."""
        sampling = row.request.sampling
        room = self.max_model_len - row.length
        row.limit = min(sampling.max_tokens or room, room)
        state = TextState(Sampler.of(row.request), Detokenizer(self.model.detokenize, sampling.stop or ()))
        if state.sampler.repetition_penalty != 1:
            state.seen = torch.tensor(self.model.penalised(row.prepared))
        row.state = state

    def prefill(self, row: Row, end: int) -> Tensor:
        """Logits of the piece's last position."""
        return self.model.prefill(row.slot, row.prepared[row.computed : end], row.computed)

    def prompt_done(self, row: Row, result: Tensor) -> Advance:
        """The prompt's own outputs, then the first token."""
        outputs = [
            replace(output, limit=row.limit) if isinstance(output, PromptChunk) else output
            for output in self.model.prompt_outputs(row.slot)
        ]
        first = self.advance(row, result)
        return Advance([*outputs, *first.outputs], first.reason)

    def step(self, rows: Sequence[Row]) -> Sequence[Tensor]:
        """Logits [vocabulary] of each row."""
        positions = [row.length + row.count - 1 for row in rows]
        return self.model.step([row.slot for row in rows], [row.state.last for row in rows], positions).unbind()

    def advance(self, row: Row, result: Tensor) -> Advance:
        """Draw the row's next token and take its text."""
        state: TextState = row.state
        token = state.sampler.draw(result, row.count, state.seen)
        row.count += 1
        state.last = token
        if state.seen is not None:
            state.seen = torch.cat((state.seen, torch.tensor([token])))
        if token in self.model.stop_ids and not row.request.sampling.ignore_eos:
            return _text("stop", state.text.finish())
        chunk = state.text.push(token)
        if state.text.stopped:
            return _text("stop", chunk)
        if row.count == row.limit:
            return _text("length", chunk, state.text.finish())
        return _text(None, chunk)

    def usage(self, row: Row) -> Usage:
        """Counts every drawn token, the stop token too, as vLLM does."""
        return Usage(row.length, row.count)

    def evidence(self, result: Any) -> Tensor:
        """Its logits."""
        assert isinstance(result, Tensor)
        return result


def _text(reason: FinishReason | None, *chunks: TextChunk | None) -> Advance:
    return Advance([chunk for chunk in chunks if chunk is not None], reason)
