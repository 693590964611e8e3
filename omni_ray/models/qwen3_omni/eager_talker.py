"""The talker's frames in plain torch, kernel by kernel: on a CPU, and as what captured frames are measured against."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from omni_ray.engine.ar_model import FrameStep
from omni_ray.engine.sampler import CANDIDATES
from omni_ray.engine.slot_decoder import SlotDecoder
from omni_ray.engine.torch_sampler import RowSampling, draw, penalise
from omni_ray.engine.types import Request
from omni_ray.models.qwen3_omni.talker_modules import PREDICTOR_TOP_K, PREDICTOR_TOP_P, FramePredictor
from omni_ray.models.qwen3_omni.talker_slots import RowInput, SlotTables


class EagerTalker:
    """Computes frames, as ``CapturedTalker`` does. All calls come from the engine's thread."""

    def __init__(self, upstream: Any, decoder: SlotDecoder, tables: SlotTables, stop: int, fixed: bool) -> None:
        """Nothing is copied.

        Args:
            upstream: transformers' talker.
            decoder: its transformer, over the KV in ``tables``.
            tables: of all slots.
            stop: the code that ends an answer.
            fixed: always compute all slots, over the whole cache.
        """
        self._decoder, self._tables = decoder, tables
        self._predictor = FramePredictor(upstream.code_predictor)
        self._codec: nn.Embedding = upstream.model.codec_embedding
        self._head = upstream.codec_head
        self._stop, self._fixed = stop, fixed
        self._sampling = RowSampling.empty(decoder.slots, decoder.device)
        # written to the device by the next step: where frames are captured there may never be one
        self._to_sample_as: dict[int, Request] = {}

    def sample_as(self, slot: int, request: Request) -> None:
        """See ``CodecLM.sample_as``."""
        self._to_sample_as[slot] = request

    def embedded(self, codes: Tensor) -> Tensor:
        """The sum of all embeddings of known frames: int64 [n, codebooks] to [n, hidden]."""
        return self._predictor.embedded(self._codec(codes[:, 0]), codes[:, 1:])

    def step(self, inputs: Sequence[RowInput]) -> FrameStep:
        """A frame of these rows, in ascending order of slots.

        Rows between the first and the last slot that are not wanted are computed too and thrown away: gathering KV
        would cost more. They write at the last position, which is nobody's.
        """
        for slot, request in self._to_sample_as.items():
            self._sampling.set(slot, request)
        self._to_sample_as.clear()
        tables, device, length = self._tables, self._decoder.device, self._decoder.length
        rows = range(self._decoder.slots) if self._fixed else range(inputs[0][0], inputs[-1][0] + 1)
        mine = slice(rows.start, rows.stop)
        text, frame, where, axes = [0] * len(rows), [0] * len(rows), [length - 1] * len(rows), [0.0] * len(rows)
        for slot, token, step, place, angle in inputs:
            row = slot - rows.start
            text[row], frame[row], where[row], axes[row] = token, step, place, angle
        embeds = tables.last[mine] + tables.text[torch.tensor(text, device=device)]
        positions = torch.tensor(where, device=device)[:, None]
        rope = torch.tensor(axes, device=device).expand(3, -1)[..., None]
        reach = length if self._fixed else max(w for w in where if w < length - 1) + 1
        hidden = self._decoder.forward(embeds[:, None], rope, positions, rows, reach)[:, 0]

        how, numbers = self._sampling.take(mine), torch.tensor(frame, device=device)
        raw = self._head(hidden).float()
        logits = penalise(raw, tables.said[mine], how.penalty).masked_fill(tables.suppressed, -torch.inf)
        candidates = CANDIDATES if self._fixed else int(how.top_k.max())
        first = draw(logits, how, numbers, 0, candidates)
        residual_how = how.following(PREDICTOR_TOP_K, PREDICTOR_TOP_P)

        def choose(codebook: int, logits: Tensor) -> Tensor:
            return draw(logits, residual_how, numbers, codebook, PREDICTOR_TOP_K)

        residual, last, tail = self._predictor.complete(hidden, self._codec(first), choose)
        taken = torch.tensor([row[0] - rows.start for row in inputs], device=device)
        places = taken + rows.start
        first, evidence = first[taken], torch.cat((raw, tail.float()), -1)[taken]
        # Only now, when nothing can fail any more.
        tables.said[places, first] = True
        tables.last[places] = last[taken]
        frames = torch.cat((first[:, None], residual[taken]), 1).cpu()
        ended = (first == self._stop).tolist()
        return FrameStep(frames, ended, torch.isfinite(evidence.sum(-1)).tolist(), evidence)
