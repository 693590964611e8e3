"""The thinker's text decoder over static KV slots, every row at a position of its own. Knows no tokenizer, no engine.

Weights, rotary tables and routed experts are those of transformers' ``Qwen3OmniMoeThinkerTextModel``; the forward pass
is ours, because its caches know no rows that join and leave, and because it takes the features of images at positions
of a whole prompt, where we compute prompts in pieces. It computes what that model computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeThinkerTextMLP

from omni_ray.engine.fixed_shapes import ELEMENTS, POSITIONS, attend_alike, rounded_up
from omni_ray.engine.packed_linear import PackedLinear


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer: its weights, and transformers' sparse block (``gate`` and ``experts``)."""

    attention_norm: Tensor
    qkv: PackedLinear
    q_norm: Tensor
    k_norm: Tensor
    attention_out: PackedLinear
    mlp_norm: Tensor
    mlp: Any


@dataclass(frozen=True, slots=True)
class Deepstack:
    """Visual features that are added behind the first layers (DeepStack, Meng et al. 2024).

    Attributes:
        columns: int64 [m], tokens of the call that they belong to.
        features: one [m, hidden] per layer, first layer first.
    """

    columns: Tensor
    features: Sequence[Tensor]


class ThinkerDecoder:
    """A mixture-of-experts decoder whose KV cache is a static table of slots.

    Shapes: n rows (slots), t tokens per row, h query heads in g groups of one KV head each, d numbers per head.
    ``kv`` is [layers, slots, 2 * g, length, d], keys before values: what a head reads lies in one piece. Nothing is
    ever cleared: what lies behind a row's place is masked. Places say where a token is
    in the cache, rope positions where it is in time and space; they differ behind images.
    """

    def __init__(self, text_model: Any, head: Tensor, slots: int, length: int, fixed: bool) -> None:
        """Take over a transformers text model's weights.

        Args:
            text_model: without biases; its weights are used as they are or copied, never changed.
            head: output projection [vocabulary, hidden].
            slots: rows of the cache.
            length: places per slot.
            fixed: shapes in which a row's numbers do not depend on the others (``engine.fixed_shapes``): slots and
                length are rounded up, and every expert is computed for every token, whatever the routing.
        """
        config = text_model.config
        assert not config.attention_bias
        assert config.hidden_act == "silu"
        self.slots = rounded_up(slots, ELEMENTS) if fixed else slots
        self.length = rounded_up(length, POSITIONS) if fixed else length
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps = config.head_dim, config.rms_norm_eps
        self.embedding: Tensor = text_model.embed_tokens.weight.detach()
        self.head = PackedLinear(head)
        self.norm: Tensor = text_model.norm.weight.detach()
        self.layers = [_fused(layer) for layer in text_model.layers]
        self.dtype, self.device = self.embedding.dtype, self.embedding.device
        self._fixed = fixed
        self._rotary = text_model.rotary_emb
        shape = (len(self.layers), self.slots, 2 * self.groups, self.length, self.head_dim)
        self.kv = torch.zeros(shape, dtype=self.dtype, device=self.device)  # untouched zeros take no memory on a CPU

    def forward(
        self,
        x: Tensor,
        places: Tensor,
        axes: Tensor,
        rows: range,
        reach: int,
        deepstack: Deepstack | None = None,
        capture: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute tokens and write their KV.

        Args:
            x: embeddings [n, t, hidden].
            places: int64 [n, t], where each token stands in its slot.
            axes: float32 [3, n, t], rope positions: time, height, width.
            rows: consecutive slots, n of them.
            reach: cache places looked at, beyond the largest of ``places``.
            deepstack: visual features of row 0.
            capture: number of layers (at least 1) behind which hidden states are wanted too.

        Returns:
            Hidden states after the last norm [n, t, hidden], and those behind the first ``capture`` layers if asked
            for: upstream's ``hidden_states[capture]``, without what deepstack adds behind the very last of them.
        """
        n, t, _ = x.shape
        g, d, per_group = self.groups, self.head_dim, self.heads // self.groups
        heads = 2 * g * torch.tensor(rows, device=x.device)[:, None] + torch.arange(2 * g, device=x.device)
        where = (heads[:, None] * self.length + places[:, :, None]).flatten()  # [n, t, 2 * g], rows of d numbers
        cos, sin = (table[:, :, None] for table in self._rotary(x, axes))
        # A group's heads go into the query axis, [n, g, per_group * t, d]: no key is copied per head.
        visible = (torch.arange(reach, device=x.device) <= places[:, :, None])[:, None].repeat(1, 1, per_group, 1)
        mask = torch.where(visible, 0.0, -torch.inf).to(self.dtype)
        attend = attend_alike if self._fixed else F.scaled_dot_product_attention
        captured = None
        for number, (layer, kv) in enumerate(zip(self.layers, self.kv, strict=True)):
            qkv = layer.qkv(self._normed(x, layer.attention_norm)).view(n, t, -1, d)
            q, k, v = torch.split(qkv, [self.heads, g, g], dim=2)
            q = _rotated(self._normed(q, layer.q_norm), cos, sin)
            k = _rotated(self._normed(k, layer.k_norm), cos, sin)
            kv.view(-1, d).index_copy_(0, where, torch.cat((k, v), 2).view(-1, d))
            known = kv[rows.start : rows.stop, :, :reach]
            q = q.reshape(n, t, g, per_group, d).permute(0, 2, 3, 1, 4).reshape(n, g, per_group * t, d)
            y = attend(q, known[:, :g], known[:, g:], mask)
            y = y.reshape(n, g, per_group, t, d).permute(0, 3, 1, 2, 4).reshape(n, t, self.heads * d)
            x = x + layer.attention_out(y)
            normed = self._normed(x, layer.mlp_norm)
            x = x + (_all_experts(layer.mlp, normed) if self._fixed else layer.mlp(normed))
            if number + 1 == capture:
                captured = x
            if deepstack is not None and number < len(deepstack.features):
                added = x[0].index_add(0, deepstack.columns, deepstack.features[number])
                x = torch.cat((added[None], x[1:]))
        return self._normed(x, self.norm), captured

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [..., vocabulary] of hidden states [..., hidden]."""
        return self.head(hidden).float()

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """What transformers' ``apply_rotary_pos_emb`` does to one tensor [n, t, heads, d]; tables [n, t, 1, d]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def _all_experts(mlp: Any, x: Tensor) -> Tensor:
    """A sparse block computed with every expert for every token, unrouted ones at weight 0: shapes never change.

    Args:
        mlp: transformers' ``Qwen3OmniMoeThinkerTextSparseMoeBlock`` (or ``...TextMLP``, in layers without routing).
        x: [n, t, hidden].
    """
    if isinstance(mlp, Qwen3OmniMoeThinkerTextMLP):
        dense: Tensor = mlp(x)
        return dense
    flat = x.flatten(0, 1)
    _, weights, chosen = mlp.gate(flat)
    experts = mlp.experts
    share = torch.zeros(len(flat), len(experts.down_proj), dtype=x.dtype, device=x.device).scatter(1, chosen, weights)
    every = flat.expand(len(experts.down_proj), -1, -1)
    gate, up = torch.bmm(every, experts.gate_up_proj.transpose(1, 2)).chunk(2, -1)
    out = torch.bmm(F.silu(gate) * up, experts.down_proj.transpose(1, 2))
    return (out * share.T[:, :, None]).sum(0).view_as(x)


def _fused(layer: Any) -> Layer:
    attention = layer.self_attn
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    return Layer(
        attention_norm=layer.input_layernorm.weight.detach(),
        qkv=PackedLinear(torch.cat([part.weight.detach() for part in parts])),
        q_norm=attention.q_norm.weight.detach(),
        k_norm=attention.k_norm.weight.detach(),
        attention_out=PackedLinear(attention.o_proj.weight),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        mlp=layer.mlp,
    )
