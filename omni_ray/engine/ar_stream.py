"""The event loop's end of one row in the decode loop: feeds it, and collects what it makes."""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from omni_ray.engine.admission import Admission
from omni_ray.engine.ar_loop import DecodeLoop
from omni_ray.engine.ar_row import News, Row, Waiting
from omni_ray.engine.resume import Resume
from omni_ray.engine.types import Finish, Output, Request


class RowStream:
    """``open`` a prompt's ``row`` once, ``feed`` and ``end``, read ``outputs`` to a ``Finish`` or an error, ``close``.

    Its row's news come to ``deliver``. While the row can compute, the engine counts as having input in hand, so that a
    hang is noticed; a row that waits for its feed hangs nobody.
    """

    def __init__(
        self, request: Request, resume: Resume | None, loop: DecodeLoop, admission: Admission, busy: ExitStack
    ) -> None:
        self.outputs: asyncio.Queue[Output | Exception] = asyncio.Queue()
        self._request = request
        self._resume = resume
        self._loop = loop
        self._admission = admission
        self._busy = busy
        self._in_hand = False
        self._row: Row | None = None
        self._sent = 0
        self._ended = False

    def row(self, prompt: Any) -> Row:
        """The row, not yet in the loop."""
        return Row(self._request, prompt, self.deliver, self._resume)

    def open(self, row: Row) -> None:
        """Submit the row.

        Raises:
            StageFailedError: the engine takes no rows any more.
        """
        self._loop.submit(row)
        self._row = row
        self._take_in_hand()

    def feed(self, item: Any) -> None:
        """Hand an item to the row."""
        assert self._row is not None
        self._sent += 1
        self._loop.feed(self._row, item)
        self._take_in_hand()

    def end(self) -> None:
        """No item follows."""
        assert self._row is not None
        self._ended = True
        self._loop.end_feed(self._row)
        self._take_in_hand()

    def fail(self, error: Exception) -> None:
        """The input failed: so does the row."""
        self.close()
        self.outputs.put_nowait(error)

    def close(self) -> None:
        """Let the row go, whatever state it is in."""
        if self._row is not None:
            self._loop.cancel(self._row)

    def _take_in_hand(self) -> None:
        if not self._in_hand:
            self._busy.enter_context(self._admission.computing())
            self._in_hand = True

    def _lay_down(self) -> None:
        self._busy.close()
        self._in_hand = False

    def deliver(self, news: Sequence[News]) -> None:
        """Take what the row made."""
        for new in news:
            if isinstance(new, Waiting):
                if new.items == self._sent and not self._ended:
                    self._lay_down()
                continue
            self.outputs.put_nowait(new)
            if isinstance(new, Finish | Exception):
                self._lay_down()  # a slow reader of what was made is no hung engine
