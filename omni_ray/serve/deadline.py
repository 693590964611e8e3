"""Until when the next message of a stream must have come."""

import asyncio
from types import TracebackType
from typing import Self


class Deadline:
    """One after the other, a stream's waits for messages. Reading a latent puts the running one off.

    A producer whose window is full, or which has said all and stays until it was read, sends nothing: it waits for us.

    As ``asyncio.timeout``, but for thousands of waits a second: the one timer is left alone when a message came in
    time, and set anew when it rings too early. ``close`` stops it.
    """

    def __init__(self) -> None:
        self._limit_s = self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None  # that waits right now
        self._cancelling = 0
        self._rang = False

    def within(self, limit_s: float) -> Self:
        """An async context that waits for a message; ``TimeoutError`` after ``limit_s`` without it or a read."""
        self._limit_s = limit_s
        return self

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelling, self._rang = self._task.cancelling(), False
        self.put_off()
        if self._timer is not None and self._timer.when() > self._due:
            self.close()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(self._due, self._ring)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        task, self._task = self._task, None
        # A cancellation from outside counts, even if it came together with ours.
        if self._rang and task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def put_off(self) -> None:
        """A latent was read."""
        self._due = asyncio.get_running_loop().time() + self._limit_s

    def close(self) -> None:
        """No further wait follows."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        if self._task is None or self._rang:
            return  # nobody waits; the next wait sets it
        loop = asyncio.get_running_loop()
        if loop.time() < self._due:
            self._timer = loop.call_at(self._due, self._ring)
        else:
            self._rang = True
            self._task.cancel()
