"""A Llama decoder over static KV slots, every row at a position of its own. Knows no tokenizer and no engine.

Weights, configuration and rotary tables come from transformers; only the forward pass is ours, because
transformers' caches know no rows that join and leave, and because it is faster (``benchmarks/ar_engine.md``). It
computes what transformers' ``LlamaModel`` computes; q, k, v and gate, up are one matrix each, and packed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from omni_ray.engine.ar_model import PREFILL_CHUNK
from omni_ray.engine.fixed_shapes import POSITIONS, ROWS, attend_alike, rounded_up
from omni_ray.engine.packed_linear import PackedLinear


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer's weights."""

    attention_norm: Tensor
    qkv: PackedLinear
    attention_out: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


class SlotLlama:
    """A Llama decoder whose KV cache is a static table of slots.

    Shapes: n rows (slots), t tokens per row, h query heads in g groups of one KV head each, d numbers per head.
    ``kv`` is [layers, slots, 2 * g, length, d], keys before values: what a head reads lies in one piece (measured: a
    step of 16 rows takes 0.85 of the time with positions outside heads). Nothing is ever cleared: what lies behind a
    row's position is masked.
    """

    def __init__(self, model: Any, slots: int, length: int, alike: bool = False) -> None:
        """Take over a transformers ``LlamaForCausalLM``'s weights.

        Args:
            model: without biases in attention or MLP; its weights are used as they are or copied, never changed.
            slots: rows of the cache.
            length: positions per slot.
            alike: give every call one shape, and a row the same bits in every slot (``fixed_shapes``): prompts in
                padded pieces, steps over all slots, attention over the whole length; both numbers are rounded up.
        """
        config: LlamaConfig = model.config
        assert not config.attention_bias
        assert not config.mlp_bias
        assert config.hidden_act == "silu"
        self.slots, self.length = slots, length
        self._alike = alike
        self._attend: Callable[..., Tensor] = F.scaled_dot_product_attention
        if alike:
            self.slots, self.length = slots, length = rounded_up(slots, ROWS), rounded_up(length, POSITIONS)
            self._attend = attend_alike
        self.heads, self.groups, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.eps = config.rms_norm_eps
        self.embedding: Tensor = model.model.embed_tokens.weight.detach()
        self.head = PackedLinear(model.lm_head.weight)
        self.norm: Tensor = model.model.norm.weight.detach()
        self.layers = [_fused(layer) for layer in model.model.layers]
        self.dtype = self.embedding.dtype
        cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(length)[None])
        half = self.head_dim // 2
        self.cos = cos[0].to(self.dtype)
        self.sin = torch.cat((-sin[0, :, :half], sin[0, :, half:]), -1).to(self.dtype)  # for `x.roll`, see `_rotate`
        # Zeros that nobody touched take no memory.
        shape = (len(self.layers), slots, 2 * self.groups, length, self.head_dim)
        self.kv = torch.zeros(shape, dtype=self.dtype)

    def forward(self, ids: Tensor, positions: Tensor, rows: range, reach: int) -> Tensor:
        """Compute tokens and write their KV.

        Args:
            ids: int64 [n, t], of the slots in ``rows``.
            positions: int64 [n, t], where each token stands in its slot.
            rows: consecutive slots, n of them.
            reach: cache positions looked at, beyond the largest of ``positions``.

        Returns:
            Hidden states after the last norm [n, t, hidden].
        """
        n, t = ids.shape
        g, d, per_group = self.groups, self.head_dim, self.heads // self.groups
        heads = 2 * g * torch.tensor(rows)[:, None] + torch.arange(2 * g)
        where = (heads[:, None] * self.length + positions[:, :, None]).flatten()  # [n, t, 2 * g], rows of d numbers
        cos, sin = self.cos[positions][:, :, None], self.sin[positions][:, :, None]
        # A group's heads go into the query axis, [n, g, per_group * t, d]: no key is copied per head, which
        # `enable_gqa` does (measured: 5 times slower in bfloat16).
        visible = (torch.arange(reach) <= positions[:, :, None])[:, None].repeat(1, 1, per_group, 1)
        mask = torch.where(visible, 0.0, -torch.inf).to(self.dtype)
        x = F.embedding(ids, self.embedding)
        hidden = x.shape[-1]
        for layer, kv in zip(self.layers, self.kv, strict=True):
            qkv = layer.qkv(F.rms_norm(x, (hidden,), layer.attention_norm, self.eps)).view(n, t, -1, d)
            rotated = self._rotate(qkv[:, :, : self.heads + g], cos, sin)
            q, k, v = rotated[:, :, : self.heads], rotated[:, :, self.heads :], qkv[:, :, self.heads + g :]
            kv.view(-1, d).index_copy_(0, where, torch.cat((k, v), 2).view(-1, d))
            known = kv[rows.start : rows.stop, :, :reach]
            q = q.reshape(n, t, g, per_group, d).permute(0, 2, 3, 1, 4).reshape(n, g, per_group * t, d)
            y = self._attend(q, known[:, :g], known[:, g:], mask)
            y = y.reshape(n, g, per_group, t, d).permute(0, 3, 1, 2, 4).reshape(n, t, self.heads * d)
            x = x + layer.attention_out(y)
            gate, up = layer.gate_up(F.rms_norm(x, (hidden,), layer.mlp_norm, self.eps)).chunk(2, -1)
            x = x + layer.down(F.silu(gate) * up)
        return F.rms_norm(x, (hidden,), self.norm, self.eps)

    def prefill(self, slot: int, ids: Sequence[int], start: int) -> Tensor:
        """Compute prompt tokens at positions ``start ..`` of a slot; float32 logits [vocabulary] of the last one."""
        last, reach = len(ids) - 1, start + len(ids)
        if self._alike:
            # The padding writes beyond the prompt, where the answer will overwrite it before anyone looks.
            ids = [*ids, *[0] * (min(PREFILL_CHUNK, self.length - start) - len(ids))]
            reach = self.length
        positions = torch.arange(start, start + len(ids))[None]
        return self.logits(self.forward(torch.tensor([ids]), positions, range(slot, slot + 1), reach)[0, last])

    def step(self, slots: Sequence[int], last_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """Compute one token per slot, as ``ARModel.step``; float32 logits [len(slots), vocabulary].

        Free slots and slots with an unfinished prompt between the first and the last one are computed too and thrown
        away, which is cheaper than gathering KV. They write at a slot's last position: no request gets that far,
        because its last token is never computed.
        """
        rows = range(self.slots) if self._alike else range(slots[0], slots[-1] + 1)
        reach = self.length if self._alike else max(positions) + 1
        ids, where = [0] * len(rows), [self.length - 1] * len(rows)
        taken = [slot - rows.start for slot in slots]
        for row, token, position in zip(taken, last_ids, positions, strict=True):
            ids[row], where[row] = token, position
        hidden = self.forward(torch.tensor(ids)[:, None], torch.tensor(where)[:, None], rows, reach)
        logits = self.logits(hidden[:, 0])
        return logits if len(taken) == len(rows) else logits[taken]

    def logits(self, hidden: Tensor) -> Tensor:
        """Float32 logits [..., vocabulary] of hidden states [..., hidden]."""
        return self.head(hidden).float()

    def _rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """As transformers' ``apply_rotary_pos_emb``: ``roll`` swaps halves, ``rotate_half``'s sign is in ``sin``."""
        return torch.addcmul(x * cos, x.roll(self.head_dim // 2, -1), sin)


def _fused(layer: Any) -> Layer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = torch.cat([part.weight.detach() for part in (attention.q_proj, attention.k_proj, attention.v_proj)])
    gate_up = torch.cat([part.weight.detach() for part in (mlp.gate_proj, mlp.up_proj)])
    return Layer(
        layer.input_layernorm.weight.detach(),
        PackedLinear(qkv),
        PackedLinear(attention.o_proj.weight),
        layer.post_attention_layernorm.weight.detach(),
        PackedLinear(gate_up),
        PackedLinear(mlp.down_proj.weight),
    )
