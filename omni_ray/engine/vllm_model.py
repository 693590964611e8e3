"""What a model must offer to be computed by vLLM: all but the forward pass. Imports no vLLM.

vLLM loads the weights, batches, samples; the model's side turns typed inputs into what vLLM takes, tokens into bytes,
and hidden rows into chunks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_ray.engine.base import EngineContext
from omni_ray.engine.types import Chunk
from omni_ray.errors import StageFailedError


@dataclass(frozen=True, slots=True)
class VLLMCheckpoint:
    """What vLLM loads.

    Attributes:
        directory: with config, weights and tokenizer.
        architecture: a class of ours, as registered with vLLM; None takes the checkpoint's own.
        keeps_rows: that class keeps hidden rows (``vllm_compat``).
        limit_mm_per_prompt: most media of each kind in one prompt; None for text only: then no tower is loaded.
        max_positions: of prompt and answer together, where the model may have fewer than ``max_model_len``.
    """

    directory: Path
    architecture: str | None = None
    limit_mm_per_prompt: Mapping[str, int] | None = None
    max_positions: int | None = None
    keeps_rows: bool = False

    def longest(self, max_model_len: int) -> int:
        """Positions of prompt and answer together: those asked for, or all that the model has."""
        return max_model_len if self.max_positions is None else min(max_model_len, self.max_positions)


@dataclass(frozen=True, slots=True)
class VLLMPrompt:
    """A prompt of n positions.

    Attributes:
        ids: token ids [n], media placeholders expanded.
        given: the same with one placeholder for each medium; vLLM expands them.
        media: vLLM's ``multi_modal_data``, in order of appearance.
        wanted: int64 [m], ascending positions whose hidden rows are given out.
        source: the model's own, for ``prompt_outputs``.
    """

    ids: Sequence[int]
    given: Sequence[int]
    media: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    wanted: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    source: Any = None

    @classmethod
    def of_text(cls, ids: Sequence[int]) -> "VLLMPrompt":
        """A prompt without media."""
        return cls(ids, ids)


class VLLMModel(ABC):
    """The model side: built as ``model_cls(context)``. ``encode`` runs on any thread, several at once.

    Attributes:
        stop_ids: tokens that end an answer: the union of all sources in the checkpoint, set by ``load``.
    """

    stop_ids: frozenset[int]

    def __init__(self, context: EngineContext) -> None:
        self.context = context

    @abstractmethod
    def load(self) -> VLLMCheckpoint:
        """Read tokenizer and configuration; blocking.

        Raises:
            ConfigError: no such model, or a file is missing or wrong.
        """

    @abstractmethod
    def encode(self, prompt: Any) -> VLLMPrompt:
        """Prepare one typed input, as this stage's processor yields it.

        Raises:
            InvalidRequestError: the request asks for what this checkpoint does not have.
        """

    @abstractmethod
    def detokenize(self, token_id: int) -> bytes:
        """UTF-8 bytes of a token, possibly a part of a character; empty for special tokens."""

    def detokenizer(self) -> Callable[[int], bytes]:
        """See ``ARModel.detokenizer``."""
        return self.detokenize

    def prompt_outputs(self, prompt: VLLMPrompt, rows: NDArray[np.float32] | None, limit: int) -> Sequence[Chunk]:
        """What the stage gives out besides text, before any token.

        Args:
            prompt: as ``encode`` made it.
            rows: float32 [m, width], hidden rows of ``prompt.wanted``; None if there are none.
            limit: most tokens of the answer.
        """
        return ()


def rows_at(places: NDArray[np.int64], values: NDArray[np.float32], wanted: NDArray[np.int64]) -> NDArray[np.float32]:
    """Rows of ``wanted`` positions.

    Args:
        places: int64 [n] in the order of computing; of a position computed twice (a preempted request's) the last row
            counts.
        values: float32 [n * width].
        wanted: int64 [m].

    Raises:
        StageFailedError: a wanted position is not among ``places``; its row would have to be invented.
    """
    row_of = {int(place): row for row, place in enumerate(places)}
    missing = [int(place) for place in wanted if int(place) not in row_of]
    if missing:
        some = f"{len(missing)} of {len(wanted)} media positions, the first of them {missing[0]}"
        raise StageFailedError(f"vLLM computed no hidden rows of {some}")
    rows = values.reshape(len(places), -1)[[row_of[int(place)] for place in wanted]]
    return np.ascontiguousarray(rows)
