"""Draws codes for the rows of a batch in torch, every row by parameters of its own. ``sampler``'s rules, vectorised.

Order, as in transformers and vLLM: repetition penalty, suppressed ids (both the caller's), temperature, ``top_k``,
``top_p`` of what ``top_k`` left. The draw is the Gumbel-max trick with counter-based noise: nothing is carried.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from omni_ray.engine.sampler import CANDIDATES
from omni_ray.engine.torch_noise import gumbel, signed
from omni_ray.engine.types import Request


@dataclass(frozen=True, slots=True)
class RowSampling:
    """How rows draw; tensors [n], one value per row.

    Attributes:
        seed: int64, see ``torch_noise.signed``.
        temperature: float32; 0 takes the most likely id.
        top_k: int64, at most ``CANDIDATES``; ids that may be drawn.
        top_p: float32.
        penalty: float32, the repetition penalty; 1 is none.
    """

    seed: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    penalty: Tensor

    @classmethod
    def empty(cls, rows: int, device: torch.device) -> "RowSampling":
        """Greedy rows."""
        return cls(
            seed=torch.zeros(rows, dtype=torch.int64, device=device),
            temperature=torch.zeros(rows, device=device),
            top_k=torch.full((rows,), CANDIDATES, device=device),
            top_p=torch.ones(rows, device=device),
            penalty=torch.ones(rows, device=device),
        )

    def set(self, row: int, request: Request) -> None:
        """Take a request's resolved sampling; what nobody said is OpenAI's default (temperature 1, top_p 1)."""
        params = request.sampling
        self.seed[row] = signed(request.seed)
        self.temperature[row] = 1.0 if params.temperature is None else params.temperature
        self.top_k[row] = min(params.top_k or CANDIDATES, CANDIDATES)
        self.top_p[row] = 1.0 if params.top_p is None else params.top_p
        self.penalty[row] = 1.0 if params.repetition_penalty is None else params.repetition_penalty

    def take(self, rows: slice) -> "RowSampling":
        """The parameters of some rows."""
        chosen = (self.seed[rows], self.temperature[rows], self.top_k[rows], self.top_p[rows], self.penalty[rows])
        return RowSampling(*chosen)

    def following(self, top_k: int, top_p: float) -> "RowSampling":
        """Fixed parameters at temperature 1 for rows that draw at all; greedy for rows that are greedy here."""
        return RowSampling(
            seed=self.seed,
            temperature=(self.temperature > 0).float(),
            top_k=torch.full_like(self.top_k, top_k),
            top_p=torch.full_like(self.top_p, top_p),
            penalty=torch.ones_like(self.penalty),
        )


def penalise(logits: Tensor, seen: Tensor, penalty: Tensor) -> Tensor:
    """Logits of ids seen before divided by ``penalty`` if positive, multiplied if negative (Keskar et al. 2019).

    Args:
        logits: float32 [n, vocabulary].
        seen: bool [n, vocabulary].
        penalty: float32 [n].
    """
    factor = penalty[:, None]
    return torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)


def draw(logits: Tensor, how: RowSampling, positions: Tensor, codebook: int, candidates: int) -> Tensor:
    """One id per row.

    Args:
        logits: float32 [n, vocabulary]; -inf rules an id out. Rows with NaN draw some id.
        how: parameters of the n rows; ``penalty`` is not used here.
        positions: int64 [n], the frame numbers.
        codebook: of the frame.
        candidates: ids looked at per row, at least the largest ``top_k`` among the rows unless that exceeds the
            vocabulary. A fixed number gives fixed shapes.

    Returns:
        int64 [n].
    """
    greedy = logits.argmax(-1)
    if not how.temperature.any():
        return greedy
    top, ids = logits.topk(min(candidates, logits.shape[-1]))
    hot = how.temperature > 0
    scaled = top / torch.where(hot, how.temperature, 1.0)[:, None]
    rank = torch.arange(top.shape[-1], device=logits.device)
    scaled = scaled.masked_fill(rank >= how.top_k[:, None], -torch.inf)
    below = (torch.softmax(scaled, -1).cumsum(-1) < how.top_p[:, None]).sum(-1, keepdim=True)
    # The token that crosses top_p stays: never empty. A sum that rounds to 1 early must cut nothing at top_p 1.
    scaled = scaled.masked_fill((rank > below) & (how.top_p < 1)[:, None], -torch.inf)
    best = (scaled + gumbel(how.seed, positions, codebook, ids)).argmax(-1, keepdim=True)
    return torch.where(hot, ids.gather(-1, best)[:, 0], greedy)
