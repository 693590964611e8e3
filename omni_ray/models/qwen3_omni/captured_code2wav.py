"""The stateful codec on a GPU: pasts in a table of slots, a CUDA graph per shape of batch, sound in pinned memory.

Shapes are (rows, frames): rows a power of two, frames one of the chunk sizes. A graph gathers its rows' pasts from the
table, computes what ``StreamingCode2Wav.advance`` computes, and puts the new pasts back; rows of nobody use a slot of
their own. A step whose shape has no graph runs the same kernels one by one.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omni_ray.engine.capture import captured
from omni_ray.engine.codec import Samples
from omni_ray.engine.frame_codec import Codes, padded_codes
from omni_ray.models.qwen3_omni.fused_code2wav import fuse
from omni_ray.models.qwen3_omni.streaming_code2wav import StreamingCode2Wav

FRAMES_AT_ONCE: Final = 800
"""Rows times frames of one step, at most: some 15 GB of activations in float32."""


@dataclass(frozen=True, slots=True)
class SlotPast:
    """One request's: its slot in the tables, and frames decoded so far. Replaced, never changed."""

    slot: int
    frames: int


class _Batch:
    """Buffers for one shape, and the kernels over them: from ``given`` (pinned) to ``sound`` (pinned).

    Made and run on the stream that is current, always the same one.
    """

    def __init__(self, owner: "CapturedCode2Wav", rows: int, frames: int) -> None:
        self._owner = owner
        self.rows, self.frames = rows, frames
        width = owner.codebooks * frames + 3
        self.given = torch.zeros(rows, width, dtype=torch.int64, device="cpu").pin_memory()
        self._given = torch.zeros(rows, width, dtype=torch.int64, device="cuda")
        self._given[:, 0] = owner.nobody
        self._sound: Tensor = torch.empty(0)
        self.sound = torch.empty(rows, frames * owner.samples_per_frame, device="cpu").pin_memory()
        self._graph: torch.cuda.CUDAGraph | None = None

    def capture(self, pool: Any) -> None:
        self._graph = captured(self._compute, torch.cuda.current_stream(), pool)

    def run(self) -> None:
        """From ``given`` to ``sound``; blocking."""
        self._given.copy_(self.given, non_blocking=True)
        if self._graph is None:
            with self._owner.rounding():
                self._compute()
        else:
            self._graph.replay()
        self.sound.copy_(self._sound, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        done.synchronize()

    def _compute(self) -> None:
        owner, given = self._owner, self._given
        slots, ages, new_frames = given[:, 0], given[:, 1], given[:, 2]
        codes = given[:, 3:].view(self.rows, owner.codebooks, self.frames)
        fresh = (ages == 0)[:, None]
        pasts = [table.index_select(0, slots).masked_fill_(fresh, 0) for table in owner.tables]
        sound, *after = owner.advance(codes, ages, new_frames, *pasts)
        self._sound = sound.float()  # may lack memory, and nothing may fail once a slot is written
        for table, past in zip(owner.tables, after, strict=True):
            table.index_copy_(0, slots, past)


class CapturedCode2Wav(StreamingCode2Wav):
    """``StreamingCode2Wav`` whose steps are graphs; one thread calls it. ``release`` each past that is over.

    The modules are transformers' ``Qwen3OmniMoeCode2Wav``, with those of ``carrying`` and ``fused_code2wav`` in them.
    """

    def __init__(
        self,
        model: Qwen3OmniMoeCode2Wav,
        slots: int,
        rows: int,
        chunk_frames: Sequence[int],
        tf32: bool,
    ) -> None:
        """Take over ``model``, allocate the tables and capture; weights must be there.

        Args:
            model: on the GPU.
            slots: requests that are open at once.
            rows: the most in one step.
            chunk_frames: the sizes in which frames come.
            tf32: whether float32 products may round their inputs to 10 bits.
        """
        super().__init__(model)
        fuse(model)
        self._tf32 = tf32
        weight = model.code_embedding.weight
        self.nobody = slots
        self.tables = [weight.new_zeros(slots + 1, size) for size in self.sizes]
        self._free = list(range(slots))
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self.row_sizes = sorted({*(1 << p for p in range(rows.bit_length()) if 1 << p < rows), rows})
        self.frame_sizes = sorted(set(chunk_frames))
        self._batches: dict[tuple[int, int], _Batch] = {}
        self._stream.wait_stream(torch.cuda.current_stream())

    def capture(self, shapes: Sequence[tuple[int, int]]) -> None:
        """Capture graphs for (rows, frames), on the thread that steps; the largest first: all share its memory."""
        with torch.inference_mode(), self.rounding(), torch.cuda.stream(self._stream):
            for rows, frames in sorted(shapes, key=lambda shape: -shape[0] * shape[1]):
                batch = _Batch(self, rows, frames)
                batch.capture(self._pool)
                self._batches[rows, frames] = batch

    def shapes(self) -> list[tuple[int, int]]:
        """All shapes worth a graph."""
        return [(r, f) for f in self.frame_sizes for r in self.row_sizes if r * f <= FRAMES_AT_ONCE]

    @torch.inference_mode()
    def step(  # type: ignore[override]
        self, pasts: Sequence[SlotPast | None], codes: Sequence[Codes]
    ) -> list[tuple[Samples, SlotPast]]:
        """See ``StreamingCode2Wav.step``; a past is a ``SlotPast``."""
        frames = self._padded(max(map(len, codes)))
        rows = next(size for size in self.row_sizes if size >= len(codes))
        free = iter(reversed(self._free))
        before = [past or SlotPast(next(free), 0) for past in pasts]
        with torch.cuda.stream(self._stream):
            batch = self._batches.get((rows, frames)) or _Batch(self, rows, frames)
        given = batch.given.numpy()
        given[:, :3] = self.nobody, 0, frames
        given[: len(codes), :3] = [(past.slot, past.frames, len(c)) for past, c in zip(before, codes, strict=True)]
        given[:, 3:] = 0
        given[: len(codes), 3:] = padded_codes(codes, frames).reshape(len(codes), -1)
        with torch.cuda.stream(self._stream):
            batch.run()
        taken = sum(past is None for past in pasts)
        del self._free[len(self._free) - taken :]
        sound = batch.sound.numpy()
        return [
            (self.fresh(row, past.frames, len(c)).copy(), SlotPast(past.slot, past.frames + len(c)))
            for row, past, c in zip(sound, before, codes, strict=False)
        ]

    def rows(self, frames: int) -> int:
        """See ``FrameDecoder.rows``."""
        return max(1, FRAMES_AT_ONCE // self._padded(frames))

    def _padded(self, frames: int) -> int:
        """Frames of a step whose longest row has ``frames``."""
        return next((size for size in self.frame_sizes if size >= frames), frames)

    def release(self, past: SlotPast) -> None:
        """Give the slot back."""
        self._free.append(past.slot)

    @contextmanager
    def rounding(self) -> Iterator[None]:
        """How float32 products round, while kernels are chosen or captured.

        The flags are the process's, which another stage may share: a graph that is replayed needs them no more.
        """
        flags = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = self._tf32
        try:
            yield
        finally:
            torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = flags
