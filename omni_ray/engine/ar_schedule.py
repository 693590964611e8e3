"""Which rows the decode loop computes next: the rows of its one thread, on their way from waiting to their end.

Between two steps rows join and leave: a waiting request takes a free slot, and its prompt is computed in pieces, one
piece, or some short prompts, between two decode steps, so that a long prompt never stops the others. While all rows
that could step are ahead of their listeners, prompts go first: nobody has heard those yet. A row whose next input has
not arrived is left out of a step and keeps its KV. What a step is, ``Steps`` knows. Knows no thread and no event loop.
"""

import heapq
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, ParamSpec

from omni_ray.engine.ar_model import PREFILL_CHUNK
from omni_ray.engine.ar_row import Advance, Letter, Mail, News, Row, Steps, Waiting
from omni_ray.engine.ar_selftest import self_test
from omni_ray.engine.batches import BatchLengthError, check_length
from omni_ray.engine.types import Finish

P = ParamSpec("P")


class RowSchedule:
    """``load``, then ``read`` letters and make ``turn`` after turn, then ``stop``; all on one thread."""

    def __init__(
        self,
        name: str,
        steps: Steps,
        slots: int,
        deterministic: bool,
        post: Callable[[Mail], None],
        busy: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """Take the stage's ``name``, for messages, and how its model steps.

        Args:
            name: the stage's.
            steps: what a step is; its model has ``slots``.
            slots: rows that are computed at once.
            deterministic: whether a row's numbers must not depend on the others; ``load`` then tries it.
            post: is called once for all that was made since the last call. The last news that a row ever gets is a
                ``Finish`` or an exception, unless it was cancelled.
            busy: is held around each call that computes, and whatever returns got on: a hung one must not look idle
                because its clients gave up.
        """
        self.name = name
        self._busy = busy
        self._post = post
        self._steps = steps
        self._deterministic = deterministic
        self._mail: list[tuple[Row, Sequence[News]]] = []
        self._slots = list(range(slots))  # free ones, a heap
        self._waiting: list[Row] = []
        self._prefilling: list[Row] = []
        self._decoding: list[Row] = []

    def load(self) -> None:
        """Load the model; raises what ``self_test`` does."""
        self._steps.model.load()
        if self._deterministic:
            self_test(self.name, self._steps, len(self._slots))

    def stop(self) -> None:
        """Free what the model holds."""
        self._steps.model.stop()

    def idle(self) -> bool:
        """Whether there is nothing to compute before a letter comes."""
        return not (self._waiting or self._prefilling or any(map(self._steps.ready, self._decoding)))

    def holds(self) -> bool:
        """Whether a row holds back what will be due."""
        return any(row.held for row in self._decoding)

    def turn(self) -> None:
        """Let rows go and join, compute prompts, make one step."""
        self._drop_cancelled()
        self._prefill()
        self._catch_up()
        self._decode()
        self._give_out()

    def send(self) -> None:
        """Post what was made since the last time: waking the event loop costs more than a row's news are worth."""
        if self._mail:
            self._post(self._mail)
            self._mail = []

    def read(self, letter: Letter) -> None:
        """A letter came; not of a cancellation, for which the row's flag is enough."""
        row = letter.row
        if letter.kind == "new":
            self._waiting.append(row)
        elif row.slot < 0:  # not yet, or no more: then nobody looks at these
            row.feed_ended |= letter.kind == "end"
            row.early.extend([letter.item] if letter.kind == "item" else [])
        elif letter.kind == "item":
            self._alone(row, self._feed, row, letter.item)
        else:
            self._alone(row, self._end_feed, row)

    def _feed(self, row: Row, item: Any) -> None:
        row.items += 1
        self._steps.feed(row, item)
        if row in self._decoding and not self._steps.ready(row):
            self._mail.append((row, (Waiting(row.items),)))  # the item was worth nothing

    def _end_feed(self, row: Row) -> None:
        row.feed_ended = True
        self._take(row, self._steps.end_feed(row))

    def _drop_cancelled(self) -> None:
        for row in [row for row in (*self._prefilling, *self._decoding) if row.cancelled]:
            self._leave(row)
        self._waiting = [row for row in self._waiting if not row.cancelled]

    def _prefill(self) -> None:
        """Let waiting rows in, and compute ``prefill_chunk`` positions of prompts, of the most urgent rows first."""
        while self._slots and self._waiting:
            row = _most_urgent(self._waiting)
            self._waiting.remove(row)
            row.slot = heapq.heappop(self._slots)
            self._prefilling.append(row)
            self._alone(row, self._join, row)
        room = chunk = self._steps.model.prefill_chunk
        while self._prefilling:
            row = _most_urgent(self._prefilling)
            # Deterministic models compute a whole piece, however short.
            room -= chunk if self._deterministic else self._piece_end(row) - row.computed
            if room < 0:
                break
            self._alone(row, self._prefill_piece, row)

    def _join(self, row: Row) -> None:
        with self._busy():
            self._steps.join(row)
        for item in row.early:
            self._feed(row, item)
        row.early.clear()
        if row.feed_ended:
            self._end_feed(row)

    def _prefill_piece(self, row: Row) -> None:
        end = self._piece_end(row)
        with self._busy():
            result = self._steps.prefill(row, end)
        row.computed = end
        if end < row.length:
            return
        self._prefilling.remove(row)
        self._decoding.append(row)
        self._take(row, self._steps.prompt_done(row, result))

    def _piece_end(self, row: Row) -> int:
        chunk = self._steps.model.prefill_chunk
        return min(row.length, (row.computed // chunk + 1) * chunk)

    def _catch_up(self) -> None:
        """Take ``PREFILL_CHUNK`` positions of one record in, of the most urgent row that goes on here."""
        rows = [row for row in self._decoding if row.behind and self._steps.ready(row)]
        if rows:
            row = _most_urgent(rows)
            self._alone(row, self._replay, row)

    def _replay(self, row: Row) -> None:
        end = min(row.recorded, row.replayed + PREFILL_CHUNK)
        with self._busy():
            self._steps.catch_up(row, end)
        row.replayed = end

    def _give_out(self) -> None:
        """What rows hold back, as soon as their listeners might miss it."""
        for row in self._decoding:
            if row.held and (outputs := self._steps.due(row)):
                self._mail.append((row, outputs))

    def _decode(self) -> None:
        """One step of every row that can make one."""
        can = (row for row in self._decoding if self._steps.ready(row) and not row.behind)
        rows = sorted(can, key=lambda row: row.slot)
        if not rows or (self._prefilling and all(row.lead.ahead() for row in rows)):
            return
        try:
            with self._busy():
                self._steps.launch(rows)
                self.send()  # only now: while the event loop reads it, this thread may have to wait for its turn
                results = self._steps.step(rows)
            check_length("a step", len(rows), len(results))
        except BatchLengthError as error:
            for row in rows:
                self._leave(row, BatchLengthError(f"stage {self.name}: {error}"))
            return
        except Exception as error:
            if len(rows) == 1:
                self._leave(rows[0], error)
                return
            for row in rows:  # who is to blame? Computing a step again writes the same KV.
                self._alone(row, self._step_alone, row)
            return
        for row, own in zip(rows, results, strict=True):
            self._alone(row, self._advance, row, own)

    def _step_alone(self, row: Row) -> None:
        with self._busy():
            self._steps.launch([row])
            (result,) = self._steps.step([row])
        self._advance(row, result)

    def _advance(self, row: Row, result: Any) -> None:
        self._take(row, self._steps.advance(row, result))

    def _take(self, row: Row, made: Advance) -> None:
        """Give out what a row made, and end it if it is over."""
        if made.reason is not None:
            self._leave(row, *made.outputs, Finish(made.reason, self._steps.usage(row)))
            return
        news: list[News] = [*made.outputs]
        if row in self._decoding and not self._steps.ready(row):
            news.append(Waiting(row.items))
        if news:
            self._mail.append((row, news))

    def _alone(self, row: Row, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Do work of one row; its error goes to the row's owner, who raises it, and touches no other row."""
        try:
            work(*args, **kwargs)
        except Exception as error:
            self._leave(row, error)

    def _leave(self, row: Row, *outputs: News) -> None:
        """Free the row's slot, then hand out what it had not given out yet and its last outputs."""
        (self._decoding if row in self._decoding else self._prefilling).remove(row)
        heapq.heappush(self._slots, row.slot)
        self._steps.model.release(row.slot)
        row.slot = -1
        self._mail.append((row, (*self._steps.rest(row), *outputs)))

    def fail_all(self, late: Sequence[Row], error: Exception) -> None:
        """Give every row that is left, and ``late`` ones, the reason why the loop is over."""
        for row in (*self._prefilling, *self._decoding):
            self._leave(row, error)
        for row in (*self._waiting, *late):
            self._mail.append((row, (error,)))
        self.send()


def _most_urgent(rows: Sequence[Row]) -> Row:
    return min(rows, key=lambda row: row.lead.urgency())
