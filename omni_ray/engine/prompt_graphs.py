"""Prompts as CUDA graphs: launched kernel by kernel, a short one costs the host far more than the GPU.

Twenty layers of some 70 kernels each take the host longer than the decode steps that wait behind them. So graphs are
captured for a few sizes, and prompts padded to the next one. What stands at the beginning of prompts is held back until
the next step needs it, and then computed together: a pack of several prompts takes about as long as one. What no graph
fits is computed kernel by kernel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Final

import torch
from torch import Tensor

from omni_ray.engine.capture import Captures, captured
from omni_ray.engine.slot_decoder import SlotDecoder

CHUNK: Final = 512
"""Most positions of a graph, and so of a piece."""

PACKS: Final = (64, 256, CHUNK)
"""Positions of a pack: beginnings of prompts."""

PIECES: Final = (128, CHUNK)
"""Positions of a piece that stands further on."""

NEAR: Final = 1024
"""A piece that ends before it looks at no more of the cache than this."""


class _Rows:
    """Positions to compute, in tensors that stay where they are; those that are not filled are nobody's."""

    def __init__(self, decoder: SlotDecoder, size: int) -> None:
        device = decoder.device
        self.embeds = torch.zeros(size, decoder.hidden, dtype=decoder.dtype, device=device)
        self.axes = torch.zeros(3, size, device=device)
        self.positions = torch.full((size,), decoder.length - 1, device=device)
        self._counting = torch.arange(size, device=device)
        self._nowhere = decoder.length - 1

    def put(self, at: int, embeds: Tensor, axes: Tensor, start: int) -> int:
        """Fill some, from ``at`` on; the number behind them."""
        end = at + len(embeds)
        self.embeds[at:end] = embeds
        self.axes[:, at:end] = axes
        torch.add(self._counting[: len(embeds)], start, out=self.positions[at:end])
        return end

    def end(self, at: int) -> None:
        """Let the rest be nobody's."""
        self.positions[at:] = self._nowhere


class PromptPack:
    """The kernels of the beginnings of several prompts."""

    def __init__(self, decoder: SlotDecoder, size: int) -> None:
        """Args: the decoder that computes, and the most positions of all prompts."""
        self._decoder = decoder
        self._rows = _Rows(decoder, size)
        self._slots = torch.zeros(size, dtype=torch.long, device=decoder.device)

    def fill(self, prompts: "Sequence[Beginning]") -> None:
        """What the next ``run`` computes; of different slots."""
        at = 0
        for prompt in prompts:
            end = self._rows.put(at, prompt.embeds, prompt.axes, 0)
            self._slots[at:end] = prompt.slot
            at = end
        self._rows.end(at)

    def run(self) -> None:
        """Write the KV; before any ``fill``, only at the last position, which is nobody's."""
        self._decoder.pack(self._rows.embeds, self._rows.axes, self._rows.positions, self._slots)


class PromptPiece:
    """The kernels of a piece of one prompt."""

    def __init__(self, decoder: SlotDecoder, size: int, reach: int) -> None:
        """Args: the decoder that computes, most positions of a piece, and how much of the cache it looks at."""
        self._decoder, self._reach = decoder, reach
        self._rows = _Rows(decoder, size)
        self._slot = torch.zeros(1, dtype=torch.long, device=decoder.device)
        self._last = torch.zeros_like(self._slot)

    def fill(self, slot: int, embeds: Tensor, axes: Tensor, start: int) -> None:
        """What the next ``run`` computes: see ``SlotDecoder.write``."""
        self._rows.end(self._rows.put(0, embeds, axes, start))
        self._slot.fill_(slot)
        self._last.fill_(start + len(embeds) - 1)

    def run(self) -> None:
        """Write the piece's KV; before any ``fill``, only at the last position, which is nobody's."""
        rows = self._rows
        self._decoder.piece(rows.embeds, rows.axes, rows.positions, self._slot, self._last, self._reach)


@dataclass(frozen=True, slots=True)
class Beginning:
    """The first positions of a prompt, perhaps all: ``embeds`` [t, hidden], float32 rope positions ``axes`` [3, t]."""

    slot: int
    embeds: Tensor
    axes: Tensor


class PromptGraphs:
    """Writes prompts by graphs. All calls from one thread, whose stream orders them and everything else."""

    def __init__(self, decoder: SlotDecoder, captures: Captures) -> None:
        """Capture the packs, and leave the pieces to ``captures``: until then they are computed kernel by kernel."""
        self._decoder = decoder
        self._packs: dict[int, tuple[PromptPack, torch.cuda.CUDAGraph]] = {}
        self._pieces: dict[tuple[int, int], tuple[PromptPiece, torch.cuda.CUDAGraph]] = {}
        self._held: list[Beginning] = []
        for size in PACKS:
            pack = PromptPack(decoder, size)
            self._packs[size] = pack, captured(pack.run)
        for size, reach in self._keys():
            captures.add(f"pieces of prompts, {size} positions up to {reach}", partial(self._capture, size, reach))

    def write(self, slot: int, embeds: Tensor, axes: Tensor, start: int) -> bool:
        """Compute a piece, as ``SlotDecoder.write``, at the latest when ``flush`` is called.

        Returns:
            Whether there is a graph for it; if not, nothing was done.
        """
        if start == 0 and len(embeds) <= CHUNK:
            held = sum(len(other.embeds) for other in self._held)
            if held + len(embeds) > CHUNK or any(other.slot == slot for other in self._held):
                self.flush()
            self._held.append(Beginning(slot, embeds, axes))
            return True
        self.flush()  # what this one looks at
        end = start + len(embeds)
        fits = (key for key in self._keys() if key[0] >= len(embeds) and key[1] >= end and key in self._pieces)
        key = next(fits, None)
        if key is None:
            return False
        piece, graph = self._pieces[key]
        piece.fill(slot, embeds, axes, start)
        graph.replay()
        return True

    def flush(self) -> None:
        """Compute what is held back."""
        if not self._held:
            return
        count = sum(len(prompt.embeds) for prompt in self._held)
        pack, graph = self._packs[next(size for size in PACKS if size >= count)]
        pack.fill(self._held)
        graph.replay()
        self._held.clear()

    def drop(self, slot: int) -> None:
        """Forget what is held back of a slot that was given up."""
        self._held = [prompt for prompt in self._held if prompt.slot != slot]

    def _keys(self) -> list[tuple[int, int]]:
        """(size, reach) of pieces, the cheapest first."""
        return list(product(PIECES, sorted({min(NEAR, self._decoder.length), self._decoder.length})))

    def _capture(self, size: int, reach: int) -> None:
        piece = PromptPiece(self._decoder, size, reach)
        self._pieces[size, reach] = piece, captured(piece.run)
