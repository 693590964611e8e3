"""The decode loop of the autoregressive engine: one thread that owns the model and steps all running requests.

Whoever submits, feeds or cancels a row writes it a letter; the thread reads all letters before each turn of its
``RowSchedule``, and sleeps until one comes when no row can step. Knows no event loop.
"""

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from omni_ray.engine.ar_row import Letter, Row
from omni_ray.engine.ar_schedule import RowSchedule
from omni_ray.errors import EngineDiedError, StageFailedError

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.05
"""How often a sleeping thread looks whether what rows hold back is due."""


class DecodeLoop:
    """``start`` the thread, ``submit`` rows, ``feed`` and ``end_feed`` them, ``cancel`` them, ``stop``."""

    def __init__(self, schedule: RowSchedule) -> None:
        """From ``start`` on ``schedule`` is the thread's own, and so are the calls that it makes."""
        self._name = schedule.name
        self._schedule = schedule
        self._inbox: queue.SimpleQueue[Letter | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._over: str | None = None
        self._died = False
        self._thread: threading.Thread | None = None

    def start(self, loaded: Callable[[BaseException | None], object]) -> None:
        """Start the thread and load the model on it; ``loaded`` is called there, with the error if there was one."""
        self._thread = threading.Thread(target=self._work, args=(loaded,), name=f"ar-{self._name}", daemon=True)
        self._thread.start()

    def submit(self, row: Row) -> None:
        """Queue a row; raises what ``check`` does."""
        with self._closing:
            self.check()
            self._inbox.put(Letter(row, "new"))

    def feed(self, row: Row, item: Any) -> None:
        """An item for a submitted row arrived; items after its end are dropped."""
        self._inbox.put(Letter(row, "item", item))

    def end_feed(self, row: Row) -> None:
        """No further item comes for a submitted row."""
        self._inbox.put(Letter(row, "end"))

    def cancel(self, row: Row) -> None:
        """Let a row go before the next step, also while the thread sleeps."""
        row.cancelled = True
        self._inbox.put(Letter(row, "cancel"))

    def check(self) -> None:
        """Raise ``StageFailedError`` if the thread takes no rows any more; ``EngineDiedError`` if nobody stopped it."""
        if self._over is not None:
            raise self._error()

    def _error(self) -> StageFailedError:
        assert self._over is not None
        return EngineDiedError(self._over, stage=self._name) if self._died else StageFailedError(self._over)

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
                self._schedule.load()
            except BaseException as error:  # whatever it is: `start` waits for it and raises it
                self._close(f"stage {self._name} did not load")
                loaded(error)
                self._schedule.stop()
                return
            loaded(None)
            try:
                while self._receive():
                    self._schedule.turn()
            except Exception:
                # Not a request's error but the loop's own: the replica is replaced.
                logger.exception("stage %s: the decode loop died", self._name)
                self._died = True
                self._close(f"stage {self._name}: the decode loop died")
            self._fail_all()
            self._schedule.stop()

    def _receive(self) -> bool:
        """Read all letters, sleeping for one only if there is nothing to compute; False when asked to stop."""
        while True:
            self._schedule.send()
            idle = self._schedule.idle()
            looks_after_s = LOOK_S if idle and self._schedule.holds() else None
            try:
                letter = self._inbox.get(block=idle, timeout=looks_after_s)
            except queue.Empty:
                return True
            if letter is None:
                return False
            if letter.kind == "cancel":
                return True  # the flag is set: what can be computed is looked at anew without the row
            self._schedule.read(letter)

    def _fail_all(self) -> None:
        letters: Sequence[Letter | None] = [self._inbox.get() for _ in range(self._inbox.qsize())]
        late = [letter.row for letter in letters if letter is not None and letter.kind == "new"]
        self._schedule.fail_all(late, self._error())
