"""Rows of a codec language model: one code frame per step, fed while they run; they wait for their feed, never pad."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omni_ray.engine.ar_model import CodecLM, FrameStep
from omni_ray.engine.ar_row import Advance, Row, Steps
from omni_ray.engine.batches import check_length
from omni_ray.engine.options import CodecLMOptions
from omni_ray.engine.types import CodeFrameChunk, Output, Usage
from omni_ray.errors import StageFailedError


@dataclass(slots=True)
class FrameResult:
    """Row ``index`` of a ``FrameStep``; ``frame`` int64 [codebooks]."""

    frame: NDArray[np.int64]
    ended: bool
    finite: bool
    whole: FrameStep
    index: int


@dataclass(frozen=True, slots=True)
class Flying:
    """Rows whose next frame is being computed, and what waits for it."""

    rows: dict[Row, None]
    land: Callable[[], FrameStep]


def _results(done: FrameStep) -> Iterator[FrameResult]:
    parts = zip(done.frames.numpy(), done.ended, done.finite, strict=True)
    return (FrameResult(*part, done, index) for index, part in enumerate(parts))


class FrameSteps(Steps):
    """See ``Steps``.

    A row makes at most as many frames as ``max_tokens``, ``max_audio_seconds`` and ``max_model_len`` allow, and, once
    its feed has ended, ``base_frames + frames_per_unit * units``: a model that misses its stop code would otherwise
    talk for minutes (cases.md C23). It then finishes with ``length``.

    A frame is given out as soon as it is made until its listener has some in hand, then together with those that follow
    it (``Lead.may_hold``), at the latest when the row ends. Frames that were known before are never held.
    """

    model: CodecLM

    def __init__(self, model: CodecLM, options: CodecLMOptions) -> None:
        super().__init__(model, options)
        self._flying: Flying | None = None
        self._launched: Flying | None = None
        self._landed: dict[Row, FrameResult] = {}
        self._base_frames, self._frames_per_unit = options.base_frames, options.frames_per_unit

    def set_up(self, row: Row) -> None:
        """See ``Steps.set_up``."""
        room = self.max_model_len - row.length
        longest = int(row.request.max_audio_seconds * self.model.frame_rate)
        row.limit = min(room, longest, row.request.sampling.max_tokens or room)
        row.units = self.model.units(row.prepared)

    def prefill(self, row: Row, end: int) -> None:
        """See ``Steps.prefill``."""
        self.model.prefill(row.slot, row.prepared[row.computed : end], row.computed)

    def prompt_done(self, row: Row, result: Any) -> Advance:
        """Nothing comes of a prompt alone; a step follows when the first unit is there."""
        self.model.sample_as(row.slot, row.request)
        if not self.exact:
            row.count = row.recorded = _known(row)
        return self._over(row)

    def catch_up(self, row: Row, end: int) -> None:
        """See ``Steps.catch_up``."""
        assert row.resume is not None
        assert row.resume.frames is not None
        self.model.follow(row.slot, torch.from_numpy(row.resume.frames[row.replayed : end]), row.replayed)

    def ready(self, row: Row) -> bool:
        """Whether the row has a frame to come, or can begin one."""
        return self._begun(row) > row.count or self._may_begin(row)

    def launch(self, rows: Sequence[Row]) -> None:
        """Of a model that computes ``ahead``, start the next frame before the last one is waited for or given out."""
        self._launched = None
        if self.model.ahead and (begun := [row for row in rows if self._may_begin(row)]):
            land = self.model.launch([row.slot for row in begun], [self._begun(row) for row in begun])
            self._launched = Flying(dict.fromkeys(begun), land)

    def step(self, rows: Sequence[Row]) -> list[FrameResult | None]:
        """See ``Steps.step``. A model that computes ``ahead`` is read one step late: None is a frame yet to come.

        What it computed for a row that is over by then is dropped.
        """
        if not self.model.ahead:
            done = self.model.step([row.slot for row in rows], [row.count for row in rows])
            return list(_results(done))
        before, self._flying, self._launched = self._flying, self._launched, None
        self._landed = {row: result for row, result in self._landed.items() if row.slot >= 0}
        if before is not None:
            done = before.land()
            if any(row.slot >= 0 for row in before.rows):  # else it is nobody's any more, whatever it is
                check_length("a step", len(before.rows), len(done.frames))
                self._landed.update(zip(before.rows, _results(done), strict=True))
        return [self._landed.pop(row, None) for row in rows]

    def _begun(self, row: Row) -> int:
        """Frames of the row that are given out, known or being computed."""
        flying = self._flying is not None and row in self._flying.rows
        return row.count + (row in self._landed) + flying

    def _may_begin(self, row: Row) -> bool:
        """Whether the unit of the row's next frame has come, or none is needed any more, and the frame is wanted."""
        begun = self._begun(row)
        return begun < row.limit and (row.units > begun or row.feed_ended)

    def advance(self, row: Row, result: FrameResult | None) -> Advance:
        """Take the frame, unless it is the stop code; it is given out when it is ``due``."""
        if result is None:
            return Advance()
        if not result.finite:
            raise StageFailedError(f"the model's logits at frame {row.count} hold NaN or infinity")
        if result.ended:
            return Advance([], "stop")
        row.held.append(result.frame)
        row.count += 1
        return self._over(row)

    def due(self, row: Row) -> list[Output]:
        """See ``Steps.due``."""
        return [] if row.lead.may_hold(len(row.held) / self.model.frame_rate) else self.rest(row)

    def rest(self, row: Row) -> list[Output]:
        """See ``Steps.rest``."""
        if not row.held:
            return []
        chunk = CodeFrameChunk(row.count - len(row.held), np.stack(row.held))
        row.held.clear()
        if (new := row.count - _known(row)) > 0:  # a listener waits for the first of these, however much came before
            row.lead.emitted(new / self.model.frame_rate)
        return [chunk]

    def usage(self, row: Row) -> Usage:
        """Frames are the only tokens that a client hears of."""
        return Usage(audio_tokens=row.count)

    def feed(self, row: Row, item: Any) -> None:
        """See ``Steps.feed``."""
        row.units += self.model.feed(row.slot, item)

    def end_feed(self, row: Row) -> Advance:
        """The feed's length bounds the answer from now on; without any unit there is none."""
        self.model.end_feed(row.slot)
        row.limit = min(row.limit, self._base_frames + self._frames_per_unit * row.units)
        return self._over(row)

    def evidence(self, result: Any) -> Tensor:
        """What the codes were drawn from."""
        assert isinstance(result, FrameResult)
        return result.whole.evidence[result.index]

    def _over(self, row: Row) -> Advance:
        if row.feed_ended and row.units == 0:
            return Advance(reason="stop")
        return Advance(reason="length" if row.count >= row.limit else None)


def _known(row: Row) -> int:
    """Frames that the listener's side has from an earlier attempt."""
    return 0 if row.resume is None or row.resume.frames is None else len(row.resume.frames)
