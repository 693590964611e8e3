"""What a model must offer to be computed by the autoregressive engine. Knows no engine."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from omni_ray.engine.base import EngineContext


class ARModel(ABC):
    """The model side: built as ``model_cls(context)``; every method below runs on the engine's one thread.

    A slot is a row of the static KV cache, 0 to ``max_num_seqs - 1``. The engine hands out the lowest free one and
    never gives a slot to two requests at once.

    Attributes:
        stop_ids: tokens that end an answer: the union of all sources in the checkpoint, set by ``load``. None may be
            assumed: id 0 is an ordinary token in many vocabularies (cases.md C24).
    """

    stop_ids: frozenset[int]

    def __init__(self, context: EngineContext) -> None:
        self.context = context

    @abstractmethod
    def load(self) -> None:
        """Load weights, set torch's threads, warm up; blocking. Raises on any missing file or tensor."""

    @abstractmethod
    def encode(self, prompt: Any) -> Sequence[int]:
        """Token ids of one typed input, as this stage's processor yields it."""

    @abstractmethod
    def detokenize(self, token_id: int) -> bytes:
        """UTF-8 bytes of a token, possibly a part of a character; empty for special tokens."""

    def begin(self, slot: int, ids: Sequence[int]) -> int:
        """Take ``slot`` for a prompt; the number of its first tokens (less than all) that the slot already holds."""
        return 0

    @abstractmethod
    def prefill(self, slot: int, ids: Sequence[int], start: int) -> Tensor:
        """Compute prompt tokens ``ids`` at positions ``start ..``; float32 logits [vocabulary] of the last one."""

    @abstractmethod
    def step(self, slots: Sequence[int], last_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Compute one token per slot: ``last_ids`` at ``positions``; equal calls must be repeatable.

        Args:
            slots: ascending.
            last_ids: the token drawn last in each slot.
            positions: where it stands in its sequence, the prompt included.

        Returns:
            float32 logits [len(slots), vocabulary].
        """

    @abstractmethod
    def release(self, slot: int) -> None:
        """The request in ``slot`` is over; called for every ``begin``, also after an error."""
