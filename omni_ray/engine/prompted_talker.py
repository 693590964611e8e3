"""A codec language model whose whole text stands in its prompt, over a ``SlotDecoder``: nothing is fed. Knows no model.

Each step computes one position from the frame before; the prompt's last position is step 0's.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from omni_ray.engine.ar_model import PREFILL_CHUNK, CodecLM
from omni_ray.engine.fixed_shapes import ELEMENTS, POSITIONS, rounded_up
from omni_ray.engine.options import CodecLMOptions
from omni_ray.engine.slot_decoder import SlotDecoder


class SpokenPrompt(Protocol):
    """A prepared prompt [n positions]: the input of its ``last`` position [hidden] apart, with ``units`` of text."""

    @property
    def last(self) -> Tensor:
        """See the class."""

    @property
    def units(self) -> int:
        """See the class."""

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows that a step computes.

    Attributes:
        mine: of all slots, consecutive ones.
        numbers: int64 [n], the step of each row; 0 where none is wanted.
        taken: int64, which of the n are wanted.
        hidden: [n, hidden], after the last norm.
    """

    mine: slice
    numbers: Tensor
    taken: Tensor
    hidden: Tensor

    @property
    def slots(self) -> Tensor:
        """int64, the slots that are wanted."""
        first: int = self.mine.start
        return self.taken + first


class PromptedTalker(CodecLM):
    """What such models share; a subclass calls ``hold`` in ``load``.

    Deterministic mode gives every call a fixed shape: steps over all rows, prompts in padded pieces, attention over the
    whole cache.
    """

    _deterministic: bool
    _device: torch.device
    _backbone: SlotDecoder
    _last: Tensor

    def hold(self, model: Any, options: CodecLMOptions, weight: Tensor) -> int:
        """Make the KV cache of an upstream decoder; how many rows it has.

        Args:
            model: as ``SlotDecoder`` takes it.
            options: of the stage.
            weight: tells device and dtype of embeddings.
        """
        self._deterministic, self._device = options.deterministic, weight.device
        rows = rounded_up(options.max_num_seqs, ELEMENTS if self._deterministic else 1)
        # One position more than any request needs: rows that are not wanted in a step write there.
        self._backbone = SlotDecoder(model, rows, rounded_up(options.max_model_len + 1, POSITIONS))
        self._lengths: dict[int, int] = {}
        self._last = torch.zeros(rows, model.config.hidden_size).to(weight)
        return rows

    @abstractmethod
    def clear(self, slot: int) -> None:
        """Forget what the slot's last request said."""

    def units(self, prompt: SpokenPrompt) -> int:
        """See ``CodecLM.units``: a unit is a token of the text to speak."""
        return prompt.units

    def begin(self, slot: int, prompt: SpokenPrompt) -> int:
        """See ``SlotModel.begin``."""
        self._lengths[slot] = len(prompt)
        self._last[slot] = prompt.last
        self.clear(slot)
        return 0

    def release(self, slot: int) -> None:
        """See ``SlotModel.release``; the slot's next request overwrites its KV."""
        self._lengths.pop(slot, None)

    def feed(self, slot: int, item: Any) -> int:
        """Nothing is fed: the prompt holds the whole text."""
        raise TypeError(f"the talker takes nothing behind its prompt, got {type(item).__name__}")

    def end_feed(self, slot: int) -> None:
        """See ``CodecLM.end_feed``."""

    def padding(self, count: int, start: int) -> int:
        """Positions that a call for ``count`` of them computes in vain, so that its shape is fixed.

        They are written behind the others, where later ones overwrite them before anyone looks.
        """
        if not self._deterministic:
            return 0
        return min(rounded_up(count, PREFILL_CHUNK), self._backbone.length - start) - count

    def compute(self, slot: int, embeds: Tensor, start: int) -> None:
        """Write the KV of positions ``start ..`` of a slot, from their inputs [n, hidden]."""
        reach = self._backbone.length if self._deterministic else start + len(embeds)
        embeds = nn.functional.pad(embeds, (0, 0, 0, self.padding(len(embeds), start)))
        positions = torch.arange(start, start + len(embeds), device=self._device)[None]
        self._backbone.forward(embeds[None], positions, positions, range(slot, slot + 1), reach)

    def follow_rows(self, slot: int, embeds: Tensor, start: int) -> None:
        """Take the inputs [n, hidden] of known frames ``start ..``; the last one is the next step's."""
        rows = torch.cat((self._last[slot][None], embeds))
        self.compute(slot, rows[:-1], self._lengths[slot] + start)
        self._last[slot] = rows[-1]

    def step_rows(self, slots: Sequence[int], steps: Sequence[int]) -> StepRows:
        """Compute the next position of every slot; nothing but KV changes.

        Rows between the first and the last slot that are not wanted are computed too and thrown away: gathering KV
        would cost more. They write at the last position, which is nobody's.
        """
        length = self._backbone.length
        rows = range(self._backbone.slots) if self._deterministic else range(slots[0], slots[-1] + 1)
        mine = slice(rows.start, rows.stop)
        where, number = [length - 1] * len(rows), [0] * len(rows)
        for slot, step in zip(slots, steps, strict=True):
            where[slot - rows.start], number[slot - rows.start] = self._lengths[slot] + step, step
        positions = torch.tensor(where, device=self._device)[:, None]
        reach = length if self._deterministic else max(w for w in where if w < length - 1) + 1
        hidden = self._backbone.forward(self._last[mine, None], positions, positions, rows, reach)[:, 0]
        taken = torch.tensor([slot - rows.start for slot in slots], device=self._device)
        return StepRows(mine, torch.tensor(number, device=self._device), taken, hidden)
