"""Rows of a text model: the engine samples a token from logits and gives out the text that is certain."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from omni_ray.engine.ar_model import ARModel
from omni_ray.engine.ar_row import Advance, Row, Steps
from omni_ray.engine.batches import check_length
from omni_ray.engine.prompts import room_for_answer
from omni_ray.engine.sampler import NOT_A_NUMBER, Sampler, draw
from omni_ray.engine.text_answer import TextAnswer
from omni_ray.engine.types import PromptChunk, Usage
from omni_ray.errors import StageFailedError


@dataclass(slots=True)
class TextState:
    """What a text row keeps.

    ``last`` is the token drawn last. ``seen``, where the repetition penalty needs it, is int64 [m + limit]: m ids of
    the prompt, then room for the answer's.
    """

    sampler: Sampler
    answer: TextAnswer
    last: int = 0
    seen: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Drawn:
    """A row's next token, or ``NOT_A_NUMBER``, and the logits [vocabulary] that it was drawn from."""

    token: int
    logits: Tensor


class TextSteps(Steps):
    """See ``Steps``. ``max_tokens`` is clamped to what ``max_model_len`` and the model leave."""

    model: ARModel

    def set_up(self, row: Row) -> None:
        """See ``Steps.set_up``."""
        sampling = row.request.sampling
        if self.model.max_positions is not None:
            row.limit = min(row.limit, room_for_answer(row.length, self.model.max_positions))
        row.limit = min(sampling.max_tokens or row.limit, row.limit)
        answer = TextAnswer(self.model.detokenizer(), self.model.stop_ids, sampling, row.limit)
        state = TextState(Sampler.of(row.request), answer)
        if state.sampler.repetition_penalty != 1:
            state.seen = torch.tensor([*self.model.penalised(row.prepared), *[0] * row.limit])
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
        if row.resume is not None and row.resume.finish is not None:
            row.count = row.resume.finish.usage.completion_tokens
            return Advance([*outputs, *row.resume.text], row.resume.finish.reason)
        made = self._go_on(row)
        if made is None:
            (drawn,) = self._draw([row], result[None])
            made = self.advance(row, drawn)
        return Advance([*outputs, *made.outputs], made.reason)

    def _go_on(self, row: Row) -> Advance | None:
        """Take the tokens of the row's record as if they had just been drawn; None if there are none to take."""
        if self.exact or row.resume is None or not row.resume.token_ids:
            return None
        made = Advance()
        for token in row.resume.token_ids:
            taken = self._take(row, token)
            made.outputs += taken.outputs
            if taken.reason is not None:
                made.reason = taken.reason
                return made
        row.recorded = row.count - 1  # the last one is computed by the step that follows it
        return made

    def catch_up(self, row: Row, end: int) -> None:
        """See ``Steps.catch_up``."""
        assert row.resume is not None
        self.model.follow(row.slot, row.resume.token_ids[row.replayed : end], row.length + row.replayed)

    def step(self, rows: Sequence[Row]) -> Sequence[Drawn]:
        """A token of each row."""
        positions = [row.length + row.count - 1 for row in rows]
        return self._draw(
            rows, self.model.step([row.slot for row in rows], [row.state.last for row in rows], positions)
        )

    def _draw(self, rows: Sequence[Row], logits: Tensor) -> list[Drawn]:
        """Tokens from float32 logits [rows, vocabulary], for all rows at once: see ``sampler``."""
        check_length("the logits of a step", len(rows), len(logits))
        states: list[TextState] = [row.state for row in rows]
        if any(state.seen is not None for state in states):
            logits = torch.stack(
                [
                    own if state.seen is None else state.sampler.penalised(own, state.seen[: row.count - row.limit])
                    for row, state, own in zip(rows, states, logits, strict=True)
                ]
            )
        tokens = draw(logits, [state.sampler for state in states], [row.count for row in rows])
        return [Drawn(token, own) for token, own in zip(tokens, logits, strict=True)]

    def advance(self, row: Row, result: Drawn) -> Advance:
        """Take the row's next token and its text."""
        if result.token == NOT_A_NUMBER:
            raise StageFailedError(f"the model's logits at position {row.count} hold NaN or infinity")
        return self._take(row, result.token)

    def _take(self, row: Row, token: int) -> Advance:
        state: TextState = row.state
        if state.seen is not None:
            state.seen[row.count - row.limit] = token
        row.count += 1
        state.last = token
        return Advance([*state.answer.add(token)], state.answer.reason)

    def usage(self, row: Row) -> Usage:
        """Counts every drawn token, the stop token too, as vLLM does."""
        return Usage(row.length, row.count)

    def evidence(self, result: Any) -> Tensor:
        """Its logits."""
        assert isinstance(result, Drawn)
        return result.logits
