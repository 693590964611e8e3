"""Draws tokens from rows of logits. A pure function: its randomness is (seed, position), nothing is carried."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omni_ray.engine.noise import GUMBEL_SPAN, SEED_MASK, gumbel
from omni_ray.engine.types import Request

CANDIDATES: Final = 1024
"""Tokens that can be drawn when the request sets no ``top_k``: the most likely ones. What lies beyond has a tiny share
of the probability, and noise for a whole vocabulary would cost as much as a small model's step."""

TEXT_CODEBOOK: Final = 0

NOT_A_NUMBER: Final = -1
"""Drawn from a row whose largest logit is NaN or infinite."""


@dataclass(frozen=True, slots=True)
class Sampler:
    """How one request draws its tokens.

    The order is temperature, ``top_k``, ``top_p`` (of what ``top_k`` left), as in vLLM and transformers; the draw is
    the Gumbel-max trick (Gumbel 1954): argmax of scaled logits plus ``gumbel(seed, position, 0, vocabulary id)``.

    Attributes:
        seed: of the request; any int.
        temperature: 0 takes the most likely token.
        top_k: how many most likely tokens may be drawn; None means ``CANDIDATES``.
        top_p: of those, the most likely ones that make up this probability.
        repetition_penalty: logits of tokens in the prompt or the output are divided by it if positive, multiplied if
            negative (CTRL, Keskar et al. 2019).
    """

    seed: int
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    repetition_penalty: float = 1.0

    @classmethod
    def of(cls, request: Request) -> Self:
        """From a request's resolved sampling; what nobody said is OpenAI's default (temperature 1, top_p 1)."""
        params = request.sampling
        return cls(
            seed=request.seed,
            temperature=1.0 if params.temperature is None else params.temperature,
            top_k=params.top_k,
            top_p=1.0 if params.top_p is None else params.top_p,
            repetition_penalty=1.0 if params.repetition_penalty is None else params.repetition_penalty,
        )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0 or self.top_k == 1

    def penalised(self, logits: Tensor, seen: Tensor) -> Tensor:
        """Logits [vocabulary] under the repetition penalty; ``seen`` int64 [n] ids so far, repeats allowed."""
        values, penalty = logits[seen], self.repetition_penalty
        return logits.index_copy(0, seen, torch.where(values > 0, values / penalty, values * penalty))


def draw(logits: Tensor, samplers: Sequence[Sampler], positions: Sequence[int]) -> list[int]:
    """One token per row.

    Args:
        logits: float32 [n, vocabulary], penalised; may hold -inf for tokens that are ruled out.
        samplers: how each row draws.
        positions: index of each token in its request's output.

    Returns:
        Token ids; ``NOT_A_NUMBER`` where the largest logit of a row is not a finite number.
    """
    values = logits.numpy()
    best = values.argmax(1)  # of NaN, if there is one
    tokens = np.where(np.isfinite(values[np.arange(len(best)), best]), best, NOT_A_NUMBER)
    hot = [row for row, sampler in enumerate(samplers) if not sampler.greedy and tokens[row] != NOT_A_NUMBER]
    if hot:
        chosen = logits if len(hot) == len(samplers) else logits[hot]
        tokens[hot] = _sampled(chosen, [samplers[row] for row in hot], np.array([positions[row] for row in hot]))
    drawn: list[int] = tokens.tolist()
    return drawn


def _sampled(logits: Tensor, samplers: Sequence[Sampler], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """``draw`` for rows that are not greedy; noise is computed only for candidates that can win."""
    counts = np.array([sampler.top_k or CANDIDATES for sampler in samplers])[:, None]
    shares = np.array([sampler.top_p for sampler in samplers])[:, None]
    temperatures = np.array([sampler.temperature for sampler in samplers], np.float32)[:, None]
    seeds = np.array([sampler.seed & SEED_MASK for sampler in samplers], np.uint64)
    top, ids = (part.numpy() for part in logits.topk(min(int(counts.max()), logits.shape[1])))
    scaled = top / temperatures
    rank = np.arange(scaled.shape[1])
    kept = (rank < counts) & (scaled > scaled[:, :1] - GUMBEL_SPAN)
    if (shares < 1).any():
        weight = np.where(rank < counts, np.exp(scaled - scaled[:, :1]), 0)
        below = np.cumsum(weight, 1, dtype=np.float64)
        # With the token that crosses top_p: never empty.
        kept &= (rank <= (below < shares * below[:, -1:]).sum(1, keepdims=True)) | (shares == 1)
    row, column = np.nonzero(kept)
    score = np.full_like(scaled, -np.inf)
    score[row, column] = scaled[row, column] + gumbel(seeds[row], positions[row], TEXT_CODEBOOK, ids[row, column])
    won: NDArray[np.int64] = ids[np.arange(len(ids)), score.argmax(1)]
    return won
