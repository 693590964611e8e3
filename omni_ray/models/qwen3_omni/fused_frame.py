"""One frame of the talker as a fixed sequence of kernels over M rows: what a CUDA graph records.

Computes what ``EagerTalker.step`` does, from the same weights and the same KV cache: the talker's step, the
draw of codebook 0, then 15 passes of the code predictor (the first one takes two positions) with a draw after each.
Nothing here depends on the rows' lengths, on what they drew, or on the host.
"""

from typing import Any

import torch
from torch import Tensor

from omni_ray.engine.kernels.attention import attend_frame
from omni_ray.engine.kernels.experts import COLLECTED, ExpertScratch, add_experts
from omni_ray.engine.kernels.frame import begin_frame
from omni_ray.engine.kernels.linear import linear, parts_of
from omni_ray.engine.kernels.rows import RESULT_EXTRA, nobody
from omni_ray.engine.kernels.sampler import Drawing, FirstCode, draw_first, draw_next
from omni_ray.engine.kernels.slot_attention import Partials, attend_slots, splits_of
from omni_ray.models.qwen3_omni.packed_weights import absorb, predictor_layer, talker_layer
from omni_ray.models.qwen3_omni.talker_slots import SlotTables


class FusedTalker:
    """The packed weights of an upstream talker, and its slots' tables; makes ``FusedFrame``s."""

    def __init__(self, upstream: Any, tables: SlotTables, stop: int, top_k: int, top_p: float) -> None:
        """Pack ``upstream``'s weights; ``top_k`` and ``top_p`` are the residual codebooks'."""
        model, predictor = upstream.model, upstream.code_predictor
        self.tables, self.top_k, self.top_p = tables, top_k, top_p
        self.layers = [talker_layer(layer) for layer in model.layers]
        # The predictor takes the normed state too: this gain is needed as well as absorbed, so the head is a copy.
        gain, self.eps = model.norm.weight, model.norm.variance_epsilon
        self.head = upstream.codec_head.weight * gain
        said, suppressed = tables.said.view(torch.uint8), tables.suppressed.view(torch.uint8)
        self.first_code = FirstCode(said, suppressed, stop, model.codec_embedding.weight, gain, self.eps)
        self.frequencies = model.rotary_emb.inv_freq.float()
        self.predictor_layers = [predictor_layer(layer) for layer in predictor.model.layers]
        self.predictor_eps = absorb(predictor.model.norm, [head.weight for head in predictor.lm_head])
        self.heads = [head.weight for head in predictor.lm_head]
        self.embeddings = [embedding.weight for embedding in predictor.model.codec_embedding]
        self.codebooks = len(self.heads) + 1
        places = torch.arange(self.codebooks, device=self.head.device)[None]
        cos, sin = predictor.model.rotary_emb(self.head, places)
        half = cos.shape[-1] // 2
        self.frame_rotary = (cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous())


class FusedFrame:
    """Buffers for frames of M rows. ``rows`` is written before ``run``, ``results`` holds the codes after it.

    Attributes:
        rows: int32 [M, ROW_WORDS], see ``engine.kernels.rows``.
        results: int32 [M, codebooks + RESULT_EXTRA]: codes, stop code said, numbers finite.
        logits: float32 [M, V], what codebook 0 was drawn from; ``residual_logits`` the last codebook.
    """

    def __init__(self, talker: FusedTalker, m: int) -> None:
        self._talker = talker
        weights, like = talker.layers[0].attention, talker.head
        device, hidden = like.device, like.shape[1]
        dim = len(weights.heads.query)
        heads = weights.out.shape[1] // dim
        small = talker.predictor_layers[0]
        small_heads = small.attention.out.shape[1] // dim
        small_groups = (len(small.attention.qkv) // dim - small_heads) // 2
        groups = talker.tables.keys.numbers.shape[2]
        splits = splits_of(m, groups, talker.tables.keys.scales is not None)

        def empty(*shape: int, dtype: torch.dtype = like.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.rows = torch.from_numpy(nobody(m)).to(device)
        self.results = empty(m, talker.codebooks + RESULT_EXTRA, dtype=torch.int32)
        self.logits = empty(m, len(like), dtype=torch.float32)
        self._x = empty(m, hidden)
        self._rotary = (empty(m, dim // 2), empty(m, dim // 2))
        self._qkv, self._seen = empty(m, len(weights.qkv)), empty(m, heads * dim)
        self._partials = Partials.empty(m, heads, splits, dim, device)
        self._experts = ExpertScratch.empty(m, talker.layers[0].experts)
        self._counts = empty(len(talker.layers), len(talker.layers[0].experts.up), dtype=torch.int32)
        self._drawing = Drawing.of(self.rows, self.results, talker.tables.last)
        self._pairs = empty(2 * m, hidden)
        self._small_qkv, self._small_seen = empty(2 * m, len(small.attention.qkv)), empty(2 * m, small_heads * dim)
        parts = parts_of(2 * m, hidden)
        self._squares = [empty(2 * m, parts, dtype=torch.float32) for _ in range(2)]
        self._collected = empty(m, -(-hidden // COLLECTED), dtype=torch.float32)
        self._inner = empty(2 * m, small.down.shape[1])
        cache = (len(talker.predictor_layers), m, small_groups, talker.codebooks, dim)
        self._keys, self._values = empty(*cache), empty(*cache)
        self.residual_logits = empty(m, len(talker.heads[0]), dtype=torch.float32)

    def run(self) -> None:
        """Launch the frame's kernels; waits for nothing."""
        talker, tables, x = self._talker, self._talker.tables, self._x
        # Of what attention and experts have written; nobody left those of the first layer's inputs.
        middle, end = self._squares[0][: len(x)], self._collected
        begin_frame(self.rows, tables.last, tables.text, talker.frequencies, x, self._rotary, self._counts)
        for index, layer in enumerate(talker.layers):
            own = layer.attention
            linear(x, own.qkv, self._qkv, eps=own.eps, squares=end if index else None)
            attend_slots(
                self._qkv, self.rows, own.heads, self._rotary, tables.keys, tables.values, index,
                self._partials, self._seen, own.scale,
            )  # fmt: skip
            linear(self._seen, own.out, x, residual=x, squares_left=middle)
            counts = self._counts[index]
            add_experts(x, self.rows, layer.experts, self._experts, counts, squares=middle, squares_left=end)
        linear(x, talker.head, self.logits, eps=talker.eps, squares=end)
        draw_first(self.logits, self._drawing, talker.first_code, x, self._pairs)
        self._residual(self._pairs, 1)
        for codebook in range(2, talker.codebooks):
            self._residual(x, codebook)

    def _residual(self, x: Tensor, codebook: int) -> None:
        """One pass of the predictor over ``x`` [M, H], the first one over [2 M, H], and the draw of ``codebook``."""
        talker, n = self._talker, len(x)
        first = 0 if codebook == 1 else codebook
        qkv, seen, inner = self._small_qkv[:n], self._small_seen[:n], self._inner[:n]
        # Of what attention and MLP have written; nobody left those of the first layer's inputs.
        middle, end = self._squares[0][:n], self._squares[1][:n]
        for index, layer in enumerate(talker.predictor_layers):
            own = layer.attention
            linear(x, own.qkv, qkv, eps=own.eps, squares=end if index else None)
            attend_frame(
                qkv, own.heads, talker.frame_rotary, self._keys[index], self._values[index], seen, own.scale, first
            )
            linear(seen, own.out, x, residual=x, squares_left=middle)
            linear(x, layer.up, inner, eps=layer.eps, gated=True, squares=middle)
            linear(inner, layer.down, x, residual=x, squares_left=end)
        newest, newest_squares = (x[1::2], end[1::2]) if codebook == 1 else (x, end)
        head = talker.heads[codebook - 1]
        linear(newest, head, self.residual_logits, eps=talker.predictor_eps, squares=newest_squares)
        embedding = talker.embeddings[codebook - 1]
        draw_next(self.residual_logits, self._drawing, codebook, talker.top_k, talker.top_p, embedding, self._x)
