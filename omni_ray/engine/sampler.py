"""Draws one token from a row of logits. A pure function: its randomness is (seed, position), nothing is carried."""

from dataclasses import dataclass
from typing import Final, Self

import torch
from torch import Tensor

from omni_ray.engine.noise import gumbel
from omni_ray.engine.types import Request
from omni_ray.errors import StageFailedError

CANDIDATES: Final = 1024
"""Tokens that can be drawn when the request sets no ``top_k``: the most likely ones. What lies beyond has a tiny share
of the probability, and noise for a whole vocabulary would cost as much as a small model's step."""

TEXT_CODEBOOK: Final = 0


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

    def draw(self, logits: Tensor, position: int, seen: Tensor | None = None) -> int:
        """The token at ``position``.

        Args:
            logits: float32 [vocabulary]; may hold -inf for tokens that are ruled out.
            position: index of the token in the request's output.
            seen: int64 [n] ids of prompt and output so far, repeats allowed; used by the repetition penalty only.

        Raises:
            StageFailedError: the largest logit is not a finite number.
        """
        if self.repetition_penalty != 1.0 and seen is not None:
            values = logits[seen]
            penalty = self.repetition_penalty
            logits = logits.index_copy(0, seen, torch.where(values > 0, values / penalty, values * penalty))
        best, token = logits.max(0)
        if not torch.isfinite(best):
            raise StageFailedError(f"the model's logits at position {position} hold NaN or infinity")
        if self.temperature == 0 or self.top_k == 1:
            return int(token)
        top, ids = logits.topk(min(self.top_k or CANDIDATES, len(logits)))
        scaled = top / self.temperature
        if self.top_p < 1:
            before = torch.softmax(scaled, 0).cumsum(0)
            keep = int((before < self.top_p).sum()) + 1  # with the token that crosses top_p: never empty
            scaled, ids = scaled[:keep], ids[:keep]
        candidates = ids.numpy()
        score = scaled.numpy() + gumbel(self.seed, position, TEXT_CODEBOOK, candidates)
        return int(candidates[score.argmax()])
