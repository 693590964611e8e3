"""What the rows of a batch carry between steps to draw the next codes; the rules of the delay pattern.

As upstream's ``HiggsAudioV2DelayPatternLogitsProcessor`` and the sampling in ``HiggsAudioV2GenerationMixin._sample``,
with our noise. Shapes: n rows, Q codebooks, V ids a codebook.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from omni_ray.engine.torch_sampler import RowSampling, draw, penalise
from omni_ray.engine.types import Request

NEVER: Final = 1 << 40
NOTHING: Final = -1


@dataclass(frozen=True, slots=True)
class RepetitionAware:
    """Repetition-aware sampling: a code that came ``most`` times in ``window`` rows is drawn anew, from all ids.

    Chen et al. 2024, "VALL-E 2", section 4.1. ``window`` 0 is none.
    """

    window: int = 0
    most: int = 0

    @classmethod
    def of(cls, directory: Path) -> "RepetitionAware":
        """What the checkpoint's ``generation_config.json`` says."""
        path = directory / "generation_config.json"
        said = json.loads(path.read_text()) if path.is_file() else {}
        window, most = said.get("ras_win_len"), said.get("ras_win_max_num_repeat")
        return cls(int(window), int(most)) if window and most else cls()


class CodeRows:
    """Draws codes for slots, each by the sampling of its own request."""

    def __init__(self, rows: int, config: Any, again: RepetitionAware, device: torch.device) -> None:
        self._begin, self._end, self._again = config.audio_stream_bos_id, config.audio_stream_eos_id, again
        shape = (rows, config.num_codebooks, config.codebook_size)
        self._books = torch.arange(config.num_codebooks, device=device)
        self._sampling = RowSampling.empty(rows, device)
        self._said = torch.zeros(shape, dtype=torch.bool, device=device)
        self._recent = torch.full((rows, again.window, config.num_codebooks), NOTHING, device=device)
        self._ended_at = torch.full((rows,), NEVER, device=device)

    def clear(self, row: int) -> None:
        """A new request begins in this row."""
        self._said[row] = False
        self._recent[row] = NOTHING
        self._ended_at[row] = NEVER

    def sample_as(self, row: int, request: Request) -> None:
        """See ``CodecLM.sample_as``."""
        self._sampling.set(row, request)

    def draw(self, logits: Tensor, rows: slice, steps: Tensor, candidates: int | None) -> Tensor:
        """The next codes of some rows; changes nothing.

        Args:
            logits: float32 [n, Q, V].
            rows: n of them.
            steps: int64 [n], number of the step.
            candidates: ids looked at per draw; None as many as these rows need.

        Returns:
            int64 [n, Q].
        """
        how = self._sampling.take(rows)
        _, books, ids = logits.shape
        candidates = int(how.top_k.max()) if candidates is None else candidates
        factor = how.penalty.repeat_interleave(books)
        weighed = penalise(logits.flatten(0, 1), self._said[rows].flatten(0, 1), factor).view(logits.shape)
        codes = torch.stack([draw(weighed[:, k], how, steps, k, candidates) for k in range(books)], 1)
        if self._again.window and bool(how.temperature.any()):
            sound = (codes != self._begin) & (codes != self._end)
            same = (self._recent[rows] == codes[:, None]) & sound[:, None]
            worn = (same.sum(1) >= self._again.most) & (how.temperature > 0)[:, None]
            anyone = how.following(ids, 1.0)
            fresh = torch.stack([draw(logits[:, k], anyone, steps, books + k, ids) for k in range(books)], 1)
            codes = torch.where(worn, fresh, codes)
        codes = torch.where(self._books > steps[:, None], self._begin, codes)
        return torch.where(self._books < (steps - self._ended_at[rows])[:, None], self._end, codes)

    def over(self, codes: Tensor) -> Tensor:
        """Whether these codes [n, Q] are the end: bool [n]."""
        ended: Tensor = (codes == self._end).all(-1)
        return ended

    def take(self, rows: Tensor, codes: Tensor, steps: Tensor) -> None:
        """The codes [n, Q] of step ``steps`` [n] stand; ``rows`` [n] are all different."""
        self._said[rows[:, None], self._books, codes] = True
        if self._again.window:
            self._recent[rows] = torch.cat((self._recent[rows], codes[:, None]), 1)[:, 1:]
        ends = (codes == self._end).any(-1) & (self._ended_at[rows] == NEVER)
        self._ended_at[rows] = torch.where(ends, steps, self._ended_at[rows])
