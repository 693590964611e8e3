"""The decode loop of the autoregressive engine: one thread that owns the model and steps all running requests.

Between two steps rows join and leave: a waiting request takes a free slot, and its prompt is computed in pieces, one
piece between two decode steps, so that a long prompt never stops the others. Knows no event loop.
"""

import heapq
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, ParamSpec

import torch
from torch import Tensor

from omni_ray.engine.ar_model import ARModel
from omni_ray.engine.detokenizer import Detokenizer
from omni_ray.engine.sampler import Sampler
from omni_ray.engine.types import Finish, FinishReason, Output, Request, TextChunk, Usage
from omni_ray.errors import InvalidRequestError, StageFailedError

logger = logging.getLogger(__name__)

P = ParamSpec("P")

PREFILL_CHUNK: Final = 128
"""Prompt tokens computed between two decode steps; pieces are cut at multiples of it."""

Deliver = Callable[[Sequence[Output | Exception]], None]


@dataclass(slots=True, eq=False)
class Row:
    """One request in the loop. The owner sets the first four; all others belong to the loop's thread.

    Attributes:
        prompt: what ``ARModel.encode`` takes.
        deliver: called on the loop's thread with new outputs, none if there is only progress. The last one it ever
            gets is a ``Finish`` or an exception, unless the row was cancelled.
        cancelled: set by the owner at any time; the row is gone before the next step.
        slot: its place in the model's KV cache, -1 before it has one.
        ids: the prompt's tokens, ``computed`` of which are in the slot.
        count: tokens drawn so far, at most ``limit``; ``last`` is the last one.
        seen: prompt and output so far, int64 [n], where the repetition penalty needs it.
    """

    request: Request
    prompt: Any
    deliver: Deliver
    cancelled: bool = False
    slot: int = -1
    ids: Sequence[int] = ()
    computed: int = 0
    count: int = 0
    limit: int = 0
    last: int = 0
    seen: Tensor | None = None
    sampler: Sampler | None = None
    text: Detokenizer | None = None


class DecodeLoop:
    """``start`` the thread, ``submit`` rows, ``stop``."""

    def __init__(self, name: str, model: ARModel, slots: int, max_model_len: int) -> None:
        self._name = name
        self._model = model
        self._max_model_len = max_model_len
        self._inbox: queue.SimpleQueue[Row | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._over: str | None = None
        self._thread: threading.Thread | None = None
        # Below: the thread's own.
        self._slots = list(range(slots))  # free ones, a heap
        self._waiting: deque[Row] = deque()
        self._prefilling: deque[Row] = deque()
        self._decoding: list[Row] = []

    def start(self, loaded: Callable[[BaseException | None], object]) -> None:
        """Start the thread and load the model on it; ``loaded`` is called there, with the error if there was one."""
        self._thread = threading.Thread(target=self._work, args=(loaded,), name=f"ar-{self._name}", daemon=True)
        self._thread.start()

    def submit(self, row: Row) -> None:
        """Queue a row; raises what ``check`` does."""
        with self._closing:
            self.check()
            self._inbox.put(row)

    def check(self) -> None:
        """Raise ``StageFailedError`` if the thread takes no rows any more."""
        if self._over is not None:
            raise StageFailedError(self._over)

    def stop(self, wait_s: float) -> None:
        """Fail all rows and end the thread after its running step; blocking, at most ``wait_s``."""
        self._close(f"stage {self._name} was stopped")
        self._inbox.put(None)
        if self._thread is not None:
            self._thread.join(wait_s)

    def _close(self, why: str) -> None:
        with self._closing:
            self._over = self._over or why

    # Below: the thread.

    def _work(self, loaded: Callable[[BaseException | None], object]) -> None:
        with torch.inference_mode():
            try:
                self._model.load()
            except BaseException as error:  # whatever it is: `start` waits for it and raises it
                self._close(f"stage {self._name} did not load")
                loaded(error)
                return
            loaded(None)
            try:
                while self._receive():
                    self._drop_cancelled()
                    self._prefill()
                    self._decode()
            except Exception:
                # Not a request's error but the loop's own: `check` reports it, and the replica is replaced.
                logger.exception("stage %s: the decode loop died", self._name)
                self._close(f"stage {self._name}: the decode loop died")
            self._fail_all()

    def _receive(self) -> bool:
        """Take new rows, waiting for one only if there is nothing to compute; False when asked to stop."""
        while True:
            try:
                row = self._inbox.get(block=not (self._waiting or self._prefilling or self._decoding))
            except queue.Empty:
                return True
            if row is None:
                return False
            self._waiting.append(row)

    def _drop_cancelled(self) -> None:
        for row in [row for row in (*self._prefilling, *self._decoding) if row.cancelled]:
            self._leave(row)
        self._waiting = deque(row for row in self._waiting if not row.cancelled)

    def _prefill(self) -> None:
        """Let waiting rows in, and compute one piece of one prompt: of the row that came first."""
        while self._slots and self._waiting:
            row = self._waiting.popleft()
            row.slot = heapq.heappop(self._slots)
            self._prefilling.append(row)
            self._alone(row, self._join, row)
        if self._prefilling:
            row = self._prefilling[0]
            self._alone(row, self._prefill_piece, row)

    def _join(self, row: Row) -> None:
        """Tokenise, check the length, and set the row up."""
        row.ids = self._model.encode(row.prompt)
        longest = self._max_model_len - 1
        if not 0 < len(row.ids) <= longest:
            raise InvalidRequestError(
                f"the messages are {len(row.ids)} tokens long; this model takes 1 to {longest}", "messages"
            )
        sampling = row.request.sampling
        room = self._max_model_len - len(row.ids)
        row.limit = min(sampling.max_tokens or room, room)
        row.sampler = Sampler.of(row.request)
        row.text = Detokenizer(self._model.detokenize, sampling.stop or ())
        if row.sampler.repetition_penalty != 1:
            row.seen = torch.tensor(row.ids)
        row.computed = self._model.begin(row.slot, row.ids)

    def _prefill_piece(self, row: Row) -> None:
        end = min(len(row.ids), (row.computed // PREFILL_CHUNK + 1) * PREFILL_CHUNK)
        logits = self._model.prefill(row.slot, row.ids[row.computed : end], row.computed)
        row.computed = end
        if end < len(row.ids):
            row.deliver(())
            return
        self._prefilling.popleft()
        self._decoding.append(row)
        self._advance(row, logits)

    def _decode(self) -> None:
        """One token for every running row."""
        rows = sorted(self._decoding, key=lambda row: row.slot)
        if not rows:
            return
        try:
            logits = self._step(rows)
        except Exception as error:
            if len(rows) == 1:
                self._leave(rows[0], error)
                return
            for row in rows:  # who is to blame? Computing a token again writes the same KV.
                self._alone(row, self._step_alone, row)
            return
        for row, own in zip(rows, logits, strict=True):
            self._alone(row, self._advance, row, own)

    def _step(self, rows: Sequence[Row]) -> Tensor:
        positions = [len(row.ids) + row.count - 1 for row in rows]
        return self._model.step([row.slot for row in rows], [row.last for row in rows], positions)

    def _step_alone(self, row: Row) -> None:
        self._advance(row, self._step([row])[0])

    def _advance(self, row: Row, logits: Tensor) -> None:
        """Draw the row's next token, give out its text, and end the row if it is over."""
        assert row.sampler is not None
        assert row.text is not None
        token = row.sampler.draw(logits, row.count, row.seen)
        row.count += 1
        row.last = token
        if row.seen is not None:
            row.seen = torch.cat((row.seen, torch.tensor([token])))
        if token in self._model.stop_ids and not row.request.sampling.ignore_eos:
            self._end(row, "stop", row.text.finish())
            return
        chunk = row.text.push(token)
        if row.text.stopped:
            self._end(row, "stop", chunk)
        elif row.count == row.limit:
            self._end(row, "length", chunk, row.text.finish())
        else:
            row.deliver(() if chunk is None else (chunk,))

    def _end(self, row: Row, reason: FinishReason, *chunks: TextChunk | None) -> None:
        ready = [chunk for chunk in chunks if chunk is not None]
        self._leave(row, *ready, Finish(reason, Usage(len(row.ids), row.count)))

    def _alone(self, row: Row, work: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Do work of one row; its error goes to the row's owner, who raises it, and touches no other row."""
        try:
            work(*args, **kwargs)
        except Exception as error:
            self._leave(row, error)

    def _leave(self, row: Row, *outputs: Output | Exception) -> None:
        """Free the row's slot, then hand out its last outputs."""
        (self._decoding if row in self._decoding else self._prefilling).remove(row)
        heapq.heappush(self._slots, row.slot)
        self._model.release(row.slot)
        row.deliver(outputs)

    def _fail_all(self) -> None:
        """Give every row that is left the reason why the loop is over."""
        assert self._over is not None
        for row in (*self._prefilling, *self._decoding):
            self._leave(row, StageFailedError(self._over))
        while not self._inbox.empty():
            if (late := self._inbox.get()) is not None:
                self._waiting.append(late)
        for row in self._waiting:
            row.deliver((StageFailedError(self._over),))
