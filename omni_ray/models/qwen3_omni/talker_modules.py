"""The talker's transformer over static KV slots, and the code predictor that completes its frames.

Weights, norms, rotary tables, experts and projections are transformers' modules (``qwen3_omni_moe``); ours is only the
attention, because transformers' caches know no rows at positions of their own, and the loop over the codes of a frame,
which upstream leaves to a nested ``generate``.

Shapes: n rows (slots), t positions per row, h query heads in g groups of one KV head each, d numbers per head.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import apply_rotary_pos_emb

from omni_ray.engine.fixed_shapes import attend_alike

Rotary = tuple[Tensor, Tensor]
"""cos and sin [n, t, d]."""

Remember = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, new keys [n, g, t, d], new values) -> all keys and values that the rows look at [n, g, seen, d]."""


def run_layers(layers: Any, x: Tensor, rotary: Rotary, mask: Tensor | None, remember: Remember) -> Tensor:
    """Decoder layers, as upstream's ``DecoderLayer.forward`` with our attention.

    Args:
        layers: upstream's modules; the talker's and the code predictor's are alike.
        x: [n, t, hidden].
        rotary: of the new positions.
        mask: additive [n, 1, t, seen]; None lets all be seen.
        remember: keeps keys and values.

    Returns:
        [n, t, hidden], before the last norm.
    """
    for index, layer in enumerate(layers):
        x = x + _attend(layer.self_attn, index, layer.input_layernorm(x), rotary, mask, remember)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return x


def _attend(attention: Any, index: int, x: Tensor, rotary: Rotary, mask: Tensor | None, remember: Remember) -> Tensor:
    n, t, _ = x.shape
    shape = (n, t, -1, attention.head_dim)
    q = attention.q_norm(attention.q_proj(x).view(shape)).transpose(1, 2)
    k = attention.k_norm(attention.k_proj(x).view(shape)).transpose(1, 2)
    v = attention.v_proj(x).view(shape).transpose(1, 2)
    q, k = apply_rotary_pos_emb(q, k, *rotary)
    k, v = remember(index, k, v)
    # A group's heads go into the query axis, so that no key is copied per head (transformers' `repeat_kv`).
    groups, per_group = k.shape[1], q.shape[1] // k.shape[1]
    q = q.reshape(n, groups, per_group * t, -1)
    mask = None if mask is None else mask.repeat(1, 1, per_group, 1)
    y = attend_alike(q, k, v, mask, attention.scaling)
    y = y.reshape(n, groups * per_group, t, -1).transpose(1, 2).reshape(n, t, -1)
    out: Tensor = attention.o_proj(y)
    return out


class SlotTalker:
    """transformers' ``Qwen3OmniMoeTalkerModel`` whose KV cache is a static table of slots.

    ``keys`` and ``values`` are [layers, slots, g, length, d]. Nothing is ever cleared: what lies behind a row's
    position is masked.
    """

    def __init__(self, model: Any, slots: int, length: int) -> None:
        """Take over an upstream model in evaluation mode; it is not changed."""
        self._model = model
        self.slots, self.length = slots, length
        config, weight = model.config, model.codec_embedding.weight
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, length, config.head_dim)
        # Zeros that nobody touched take no memory.
        self.keys = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.values = torch.zeros_like(self.keys)

    def forward(self, embeds: Tensor, axes: Tensor, positions: Tensor, rows: range, reach: int) -> Tensor:
        """Compute positions and write their KV.

        Args:
            embeds: [n, t, hidden], of the slots in ``rows``.
            axes: float32 [3, n, t], rope positions.
            positions: int64 [n, t], where each one stands in its slot.
            rows: consecutive slots, n of them.
            reach: cache positions looked at, beyond the largest of ``positions``.

        Returns:
            Hidden states after the last norm [n, t, hidden].
        """
        mine = slice(rows.start, rows.stop)
        row = torch.arange(rows.start, rows.stop, device=embeds.device)[:, None]
        visible = (torch.arange(reach, device=embeds.device) <= positions[:, :, None])[:, None]

        def remember(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            keys, values = self.keys[layer], self.values[layer]
            keys[row, :, positions] = k.transpose(1, 2)
            values[row, :, positions] = v.transpose(1, 2)
            return keys[mine, :, :reach], values[mine, :, :reach]

        rotary = self._model.rotary_emb(embeds, axes)
        mask = torch.where(visible, 0.0, -torch.inf).to(embeds.dtype)
        hidden: Tensor = self._model.norm(run_layers(self._model.layers, embeds, rotary, mask, remember))
        return hidden


class FramePredictor:
    """transformers' code predictor: the codes of a frame behind the first, one small step each.

    Its cache holds one frame: the talker's hidden state, the first code and all but the last residual code.
    """

    def __init__(self, predictor: Any) -> None:
        """Take over an upstream ``Qwen3OmniMoeTalkerCodePredictorModelForConditionalGeneration``; it is not changed."""
        self._model = predictor.model
        self._heads = predictor.lm_head
        self._embeddings = predictor.model.codec_embedding

    def embedded(self, first: Tensor, codes: Tensor) -> Tensor:
        """The sum of all embeddings of known frames [n, hidden], as ``complete`` gives it.

        Args:
            first: [n, hidden], the talker's embedding of the first codes.
            codes: int64 [n, codebooks - 1], the residual ones.
        """
        rows = [embedding(own) for embedding, own in zip(self._embeddings, codes.unbind(1), strict=True)]
        return torch.stack([first, *rows], 1).sum(1)

    def complete(
        self, hidden: Tensor, first: Tensor, choose: Callable[[int, Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Predict the residual codes of one frame in n rows.

        Args:
            hidden: [n, hidden], the talker's, from which the first code was drawn.
            first: [n, hidden], the talker's embedding of the first code.
            choose: (codebook, float32 logits [n, vocabulary]) -> codes int64 [n].

        Returns:
            Codes int64 [n, codebooks - 1], the sum of all the frame's embeddings [n, hidden] (what the talker's next
            step starts from), and the last hidden state [n, hidden].
        """
        past: list[tuple[Tensor, Tensor]] = []

        def remember(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            if layer == len(past):
                past.append((k, v))
            else:
                keys, values = past[layer]
                past[layer] = (torch.cat((keys, k), 2), torch.cat((values, v), 2))
            return past[layer]

        x = torch.stack((hidden, first), 1)
        mask: Tensor | None = torch.full((2, 2), -torch.inf, dtype=x.dtype, device=x.device).triu(1)[None, None]
        codes, embeds, start = [], [first], 0
        for group, (head, embedding) in enumerate(zip(self._heads, self._embeddings, strict=True)):
            where = torch.arange(start, start + x.shape[1], device=x.device)[None]
            start += x.shape[1]
            out = self._model.norm(run_layers(self._model.layers, x, self._model.rotary_emb(x, where), mask, remember))[
                :, -1
            ]
            codes.append(choose(group + 1, head(out).float()))
            embeds.append(embedding(codes[-1]))
            x, mask = embeds[-1][:, None], None
        return torch.stack(codes, 1), torch.stack(embeds, 1).sum(1), out
