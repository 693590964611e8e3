"""Pieces of prompts as CUDA graphs: launched kernel by kernel, a short one costs the host far more than the GPU.

Twenty layers of some 70 kernels each take the host longer than the decode step that waits behind them. A graph is
captured for a few sizes; a piece is padded to the next one. What no graph fits is computed kernel by kernel.
"""

import logging
import threading
from collections.abc import Sequence
from itertools import product
from typing import Final

import torch
from torch import Tensor

from omni_ray.engine.ar_model import PREFILL_CHUNK
from omni_ray.engine.capture import captured
from omni_ray.engine.slot_decoder import SlotDecoder

logger = logging.getLogger(__name__)

SIZES: Final = (32, PREFILL_CHUNK)
"""Positions of a piece: the tail of a prompt, and a whole piece."""

NEAR: Final = 512
"""A prompt that ends before it looks at no more of the cache than this."""


class PromptPiece:
    """The kernels of one piece, over tensors that stay where they are."""

    def __init__(self, decoder: SlotDecoder, size: int, reach: int) -> None:
        """Args: the decoder that computes, most positions of a piece, and how much of the cache it looks at."""
        device, dtype = decoder.device, decoder.dtype
        self._decoder, self._reach = decoder, reach
        self._embeds = torch.zeros(size, decoder.hidden, dtype=dtype, device=device)
        self._axes = torch.zeros(3, size, device=device)
        self._counting = torch.arange(size, device=device)
        self._nowhere = decoder.length - 1
        self._positions = torch.full_like(self._counting, self._nowhere)
        self._slot = torch.zeros(1, dtype=torch.long, device=device)
        self._last = torch.zeros_like(self._slot)

    def fill(self, slot: int, embeds: Tensor, axes: Tensor, start: int) -> None:
        """What the next ``run`` computes: see ``SlotDecoder.write``."""
        count = len(embeds)
        self._embeds[:count] = embeds
        self._axes[:, :count] = axes
        torch.add(self._counting, start, out=self._positions)
        self._positions[count:] = self._nowhere
        self._slot.fill_(slot)
        self._last.fill_(start + count - 1)

    def run(self) -> None:
        """Write the piece's KV; before any ``fill``, only at the last position, which is nobody's."""
        self._decoder.piece(self._embeds, self._axes, self._positions, self._slot, self._last, self._reach)


class PromptGraphs:
    """Writes pieces of prompts by graphs. ``write`` from one thread, whose stream orders them and everything else."""

    def __init__(self, decoder: SlotDecoder) -> None:
        """Capture the graphs of near prompts, and begin to capture the others on a thread of their own."""
        self._decoder = decoder
        self._graphs: dict[tuple[int, int], tuple[PromptPiece, torch.cuda.CUDAGraph]] = {}
        self._stopped = threading.Event()
        near = min(NEAR, decoder.length)
        self._capture([(size, near) for size in SIZES])
        far = [(size, decoder.length) for size in SIZES if decoder.length > near]
        self._thread = threading.Thread(target=self._capture_rare, args=(far,), name="prompt-graphs", daemon=True)
        self._thread.start()

    def write(self, slot: int, embeds: Tensor, axes: Tensor, start: int) -> bool:
        """Compute a piece, as ``SlotDecoder.write``; False if no graph is there for it, and nothing was done."""
        fitting = [key for key in product(SIZES, (NEAR, self._decoder.length)) if key in self._graphs]
        key = next((k for k in fitting if k[0] >= len(embeds) and k[1] >= start + len(embeds)), None)
        if key is None:
            return False
        piece, graph = self._graphs[key]
        piece.fill(slot, embeds, axes, start)
        graph.replay()
        return True

    def wait(self) -> None:
        """Until all graphs are captured."""
        self._thread.join()

    def stop(self) -> None:
        """Capture no further graphs."""
        self._stopped.set()

    def _capture(self, keys: Sequence[tuple[int, int]]) -> None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        for size, reach in keys:
            if self._stopped.is_set():
                return
            piece = PromptPiece(self._decoder, size, reach)
            self._graphs[size, reach] = piece, captured(piece.run, stream)

    def _capture_rare(self, keys: Sequence[tuple[int, int]]) -> None:
        try:
            with torch.inference_mode():
                self._capture(keys)
        except Exception:
            # Such pieces are computed kernel by kernel: slower, not wrong.
            logger.exception("graphs of prompts beyond %d positions were not captured", NEAR)
