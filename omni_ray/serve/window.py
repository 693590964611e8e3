"""How many bytes of latents of one stream may exist unread: a producer that is ahead of its consumer waits."""

import asyncio


class Window:
    """The producer's account of one stream. ``acquire`` or ``note`` what is sent, ``read`` what was read."""

    def __init__(self, nbytes: int) -> None:
        self._window = nbytes
        self._sent = 0
        self._read = 0
        self._moved = asyncio.Event()

    async def acquire(self, nbytes: int) -> None:
        """Wait until ``nbytes`` more fit the window; one item always fits an empty window."""
        while self._sent > self._read and self._sent + nbytes - self._read > self._window:
            self._moved.clear()
            await self._moved.wait()
        self._sent += nbytes

    def note(self, nbytes: int) -> None:
        """Account for ``nbytes`` that are sent without waiting; they will be reported as read like all others."""
        self._sent += nbytes

    def read(self, nbytes: int) -> None:
        """So many bytes more were read."""
        self._read += nbytes
        self._moved.set()


class LocalLatent:
    """A latent that a consumer in the same process has yet to read."""

    def __init__(self, window: Window, nbytes: int) -> None:
        self._window = window
        self._nbytes = nbytes

    def read(self) -> None:
        """It was used, or is not wanted: its bytes leave the window, once."""
        self._window.read(self._nbytes)
        self._nbytes = 0
