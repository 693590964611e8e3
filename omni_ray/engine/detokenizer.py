"""Turns token ids into text as they come: valid UTF-8 only, ending before any stop string. Knows no tokenizer."""

import codecs
from collections import deque
from collections.abc import Callable, Sequence

from omni_ray.engine.types import TextChunk


class Detokenizer:
    """The text of one request's tokens, each token decoded once.

    Text that may be the beginning of a stop string is held back until it is known not to be, and bytes of an unfinished
    character until the character is complete, so what was given out never has to be taken back.

    Attributes:
        stopped: a stop string has appeared; nothing more will come.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], stop: Sequence[str] = ()) -> None:
        """``token_bytes`` gives a token's UTF-8 bytes, possibly part of a character, empty for special tokens."""
        self.stopped = False
        self._token_bytes = token_bytes
        self._stop = tuple(text for text in stop if text)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._tokens: deque[tuple[int, int]] = deque()  # id, and where in `_held` its text begins
        self._position = 0

    def push(self, token_id: int) -> TextChunk | None:
        """Add a token; the chunk it makes certain, if any.

        A chunk carries every token whose text begins in or before it. Tokens that lie wholly inside a stop string are
        in no chunk.
        """
        self._tokens.append((token_id, len(self._held)))
        self._held += self._decoder.decode(self._token_bytes(token_id))
        found = [at for at in (self._held.find(text) for text in self._stop) if at >= 0]
        self.stopped = bool(found)
        return self._take(min(found) if found else len(self._held) - self._begun())

    def finish(self) -> TextChunk | None:
        """What was held back, now that no token follows. An unfinished character is dropped, it cannot be spoken."""
        return self._take(len(self._held))

    def _begun(self) -> int:
        """Length of the longest end of the held text with which a stop string begins."""
        longest = max((len(text) for text in self._stop), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(text.startswith(self._held[-size:]) for text in self._stop):
                return size
        return 0

    def _take(self, size: int) -> TextChunk | None:
        if size == 0:
            return None
        ids = []
        while self._tokens and self._tokens[0][1] < size:
            ids.append(self._tokens.popleft()[0])
        self._tokens = deque((token, start - size) for token, start in self._tokens)
        chunk = TextChunk(self._position, self._held[:size], tuple(ids))
        self._position += len(ids)
        self._held = self._held[size:]
        return chunk
