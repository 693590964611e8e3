"""Which of an answer's tokens are meant to be heard."""

from omni_ray.engine.types import PromptChunk


class Heard:
    """Tells words from markup and from spans such as tool calls; tokens are asked about once each, in order."""

    def __init__(self, prompt: PromptChunk) -> None:
        self._silent, self._ends = prompt.silent, dict(prompt.silent_spans)
        self._until: int | None = None  # the id that ends the silent span we are in

    def next(self, token: int) -> bool:
        """Whether the answer's next token is to be heard."""
        if self._until is not None:
            if token == self._until:
                self._until = None
            return False
        self._until = self._ends.get(token)
        return self._until is None and token not in self._silent
