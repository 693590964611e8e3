"""One text answer as its tokens come: where it ends, and the text that is certain. Knows no engine and no tokenizer."""

from collections.abc import Callable

from omni_ray.config.sampling import SamplingParams
from omni_ray.engine.detokenizer import Detokenizer
from omni_ray.engine.types import FinishReason, TextChunk


class TextAnswer:
    """``add`` every drawn token, in order, until ``reason`` is set.

    Attributes:
        count: tokens drawn, the stop token too.
        reason: why the answer is over; None while it is not.
    """

    def __init__(
        self, detokenize: Callable[[int], bytes], stop_ids: frozenset[int], sampling: SamplingParams, limit: int
    ) -> None:
        """Begin an answer.

        Args:
            detokenize: UTF-8 bytes of a token, possibly a part of a character; empty for special tokens.
            stop_ids: tokens that end it, unless ``sampling.ignore_eos``; they are in no chunk.
            sampling: its ``stop`` strings end it too.
            limit: most tokens it may have.
        """
        self.count = 0
        self.reason: FinishReason | None = None
        self._text = Detokenizer(detokenize, sampling.stop or ())
        self._stop_ids = frozenset() if sampling.ignore_eos else stop_ids
        self._limit = limit

    def add(self, token: int) -> list[TextChunk]:
        """The chunks that this token makes certain."""
        assert self.reason is None
        self.count += 1
        if token in self._stop_ids:
            self.reason = "stop"
            return _present(self._text.finish())
        chunk = self._text.push(token)
        if self._text.stopped:
            self.reason = "stop"
        elif self.count == self._limit:
            self.reason = "length"
            return _present(chunk, self._text.finish())
        return _present(chunk)


def _present(*chunks: TextChunk | None) -> list[TextChunk]:
    return [chunk for chunk in chunks if chunk is not None]
