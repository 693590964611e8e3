"""Server-sent events from bytes: the data of each event, whatever the line ends and wherever the pieces are cut."""

from collections.abc import Iterator


class EventReader:
    """Takes a body apart. Comments, ids and event names are dropped; data says it all."""

    def __init__(self) -> None:
        self._line = b""
        self._data: list[bytes] = []

    def push(self, piece: bytes) -> Iterator[bytes]:
        """The data of every event that ``piece`` completes."""
        *lines, self._line = (self._line + piece).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                yield b"\n".join(self._data)
                self._data = []
