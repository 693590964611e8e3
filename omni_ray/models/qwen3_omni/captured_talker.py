"""The talker's frames on a GPU: slots' tables, what each row of a frame is told, and graphs of the fused frame."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omni_ray.engine.ar_model import FrameStep
from omni_ray.engine.capture import Captures
from omni_ray.engine.frame_graphs import FrameGraphs
from omni_ray.engine.kernels.rows import ROW_WORDS
from omni_ray.engine.sampler import CANDIDATES
from omni_ray.engine.types import Request
from omni_ray.models.qwen3_omni.fused_frame import FusedFrame, FusedTalker
from omni_ray.models.qwen3_omni.talker_slots import RowInput, SlotTables


class CapturedTalker:
    """Launches frames. All calls come from the engine's thread, whose CUDA stream orders them after prompts."""

    def __init__(
        self,
        upstream: Any,
        tables: SlotTables,
        stop: int,
        top_k: int,
        top_p: float,
        rows: int,
        fixed: bool,
        captures: Captures,
    ) -> None:
        """Pack the weights and capture.

        Args:
            upstream: transformers' talker; see ``packed_weights``.
            tables: of all slots.
            stop: the code that ends an answer.
            top_k: of the residual codebooks.
            top_p: likewise.
            rows: the most in one frame.
            fixed: always compute ``rows`` rows, and keep what the codes were drawn from.
            captures: for graphs that can wait.
        """
        self._fused = FusedTalker(upstream, tables, stop, top_k, top_p)
        self._codes = self._fused.codebooks
        self._fixed, self._rows = fixed, rows
        self._sampling = np.zeros((len(tables.last), ROW_WORDS), np.int32)
        self.graphs = FrameGraphs(lambda m: FusedFrame(self._fused, m), rows, captures, only_largest=fixed)

    def sample_as(self, slot: int, request: Request) -> None:
        """How the slot draws; defaults as ``RowSampling.set``."""
        params, row = request.sampling, self._sampling[slot]
        row[5:7] = np.array([request.seed & (2**64 - 1)], np.uint64).view(np.int32)
        numbers = row.view(np.float32)
        numbers[7] = 1.0 if params.temperature is None else params.temperature
        row[8] = min(params.top_k or CANDIDATES, CANDIDATES)
        numbers[9] = 1.0 if params.top_p is None else params.top_p
        numbers[10] = 1.0 if params.repetition_penalty is None else params.repetition_penalty

    def table(self, inputs: Sequence[RowInput]) -> NDArray[np.int32]:
        """What a frame of these rows is told: [n, ROW_WORDS]."""
        table = self._sampling[[row[0] for row in inputs]]
        table[:, :4] = [row[:4] for row in inputs]
        table.view(np.float32)[:, 4] = [row[4] for row in inputs]
        return table

    def launch(self, inputs: Sequence[RowInput]) -> Callable[[], FrameStep]:
        """Start a frame of these rows; the result waits for it."""
        flight = self.graphs.launch(self.table(inputs))
        evidence = self._evidence(len(inputs))

        def land() -> FrameStep:
            results = flight.land()
            codes = torch.from_numpy(results[:, : self._codes].astype(np.int64))
            stopped, finite = results[:, self._codes], results[:, self._codes + 1]
            return FrameStep(codes, (stopped != 0).tolist(), (finite != 0).tolist(), evidence)

        return land

    def _evidence(self, count: int) -> Tensor:
        if not self._fixed:
            return torch.empty(count, 0)
        program = self.graphs.program(self._rows)
        assert isinstance(program, FusedFrame)
        return torch.cat((program.logits, program.residual_logits), 1)[:count]
