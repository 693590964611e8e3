"""A transformer over static KV slots, every row at a position of its own.

Weights, norms, rotary tables, MLPs and projections are upstream's modules; ours is only the attention, because
transformers' caches know no rows at positions of their own. Upstream's layers must be shaped like Llama's or Qwen3's.

Shapes: n rows (slots), t positions per row, h query heads in g groups of one KV head each, d numbers per head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from omni_ray.engine.ar_model import PREFILL_CHUNK
from omni_ray.engine.fixed_shapes import attend_alike
from omni_ray.engine.kv_table import KVTable
from omni_ray.engine.rotary import rotate

Rotary = tuple[Tensor, Tensor]
"""cos and sin [n, t, d]."""

Remember = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(layer, new keys [n, g, t, d], new values) -> all keys and values that the rows look at [n, g, seen, d]."""


def run_layers(layers: Any, x: Tensor, rotary: Rotary, mask: Tensor | None, remember: Remember) -> Tensor:
    """Decoder layers, as upstream's ``DecoderLayer.forward`` with our attention.

    Args:
        layers: upstream's modules.
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
    q, k, v = (project(x).view(shape) for project in (attention.q_proj, attention.k_proj, attention.v_proj))
    if "q_norm" in attention._modules:  # Qwen3's, not Llama's
        q, k = attention.q_norm(q), attention.k_norm(k)
    q, k, v = rotate(q.transpose(1, 2), *rotary), rotate(k.transpose(1, 2), *rotary), v.transpose(1, 2)
    k, v = remember(index, k, v)
    # A group's heads go into the query axis, so that no key is copied per head (transformers' `repeat_kv`).
    groups, per_group = k.shape[1], q.shape[1] // k.shape[1]
    q = q.reshape(n, groups, per_group * t, -1)
    mask = None if mask is None else mask.repeat(1, 1, per_group, 1)
    y = attend_alike(q, k, v, mask, attention.scaling)
    y = y.reshape(n, groups * per_group, t, -1).transpose(1, 2).reshape(n, t, -1)
    out: Tensor = attention.o_proj(y)
    return out


class SlotDecoder:
    """A decoder of transformers (``layers``, ``norm``, ``rotary_emb``) whose KV cache is a static table of slots.

    Nothing in ``keys`` and ``values`` is ever cleared: what lies behind a row's position is masked. ``hidden`` is the
    width of embeddings, which are of ``dtype`` and on ``device``.
    """

    def __init__(self, model: Any, slots: int, length: int, *, fp8: bool = False) -> None:
        """Take over an upstream model in evaluation mode; it is not changed. With ``fp8`` the cache has 8 bits."""
        self._model = model
        self.slots, self.length, self.hidden = slots, length, int(model.config.hidden_size)
        config, weight = model.config, model.norm.weight
        self.dtype, self.device = weight.dtype, weight.device
        shape = (config.num_hidden_layers, slots, config.num_key_value_heads, length, config.head_dim)
        self.keys, self.values = KVTable.zeros(shape, weight, fp8), KVTable.zeros(shape, weight, fp8)

    def forward(self, embeds: Tensor, angles: Tensor, positions: Tensor, rows: range, reach: int) -> Tensor:
        """Compute positions and write their KV.

        Args:
            embeds: [n, t, hidden], of the slots in ``rows``.
            angles: rope positions as the upstream model takes them: [n, t], or float32 [3, n, t].
            positions: int64 [n, t], where each one stands in its slot.
            rows: consecutive slots, n of them.
            reach: cache positions looked at, beyond the largest of ``positions``.

        Returns:
            Hidden states after the last norm [n, t, hidden].
        """
        row = torch.arange(rows.start, rows.stop, device=embeds.device)[:, None]
        visible = torch.arange(reach, device=embeds.device) <= positions[:, :, None]

        def remember(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            self.keys.write(layer, row, positions, k)
            self.values.write(layer, row, positions, v)
            mine = slice(rows.start, rows.stop)
            return self.keys.read(layer, mine, reach, k.dtype), self.values.read(layer, mine, reach, v.dtype)

        return self._run(embeds, angles, visible, remember)

    def piece(self, embeds: Tensor, axes: Tensor, positions: Tensor, slot: Tensor, last: Tensor, reach: int) -> None:
        """Compute positions of one slot, for their KV alone, in a call that a CUDA graph can repeat for other slots.

        Args:
            embeds: [t, hidden].
            axes: float32 rope positions [3, t].
            positions: int64 [t], where each one stands; those of padding at the last of all, which is nobody's.
            slot: int64 [1], whose.
            last: int64 [1], the largest of ``positions`` without padding's.
            reach: cache positions looked at, beyond ``last``.
        """
        places = torch.arange(reach, device=embeds.device)
        # behind `last` lies what an earlier owner left, not a number perhaps, and zero times that would be none either
        others = (places > last)[:, None]

        def remember(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            self.keys.write(layer, slot[:, None], positions[None], k)
            self.values.write(layer, slot[:, None], positions[None], v)
            keys, values = self.keys.read(layer, slot, reach, k.dtype), self.values.read(layer, slot, reach, v.dtype)
            return keys.masked_fill(others, 0), values.masked_fill(others, 0)

        self._run(embeds[None], axes[:, None], (places <= positions[:, None])[None], remember)

    def pack(self, embeds: Tensor, axes: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Compute positions of several slots, each slot's from its first on, for their KV alone, in one call.

        What is no number in one slot's positions, or in padding's, reaches no other slot.

        Args:
            embeds: [t, hidden].
            axes: float32 rope positions [3, t].
            positions: int64 [t], where each one stands in its slot; those of padding at the last of all.
            slots: int64 [t], whose each one is.
        """
        visible = (slots == slots[:, None]) & (positions <= positions[:, None])

        def remember(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            for table, new in ((self.keys, k), (self.values, v)):
                table.write(layer, slots[:, None], positions[:, None], new[0].transpose(0, 1)[:, :, None])
            # nobody looks at what was there before; keys are normed, so none that is left is too large to be masked
            return k.nan_to_num(0, 0, 0), v.nan_to_num(0, 0, 0)

        self._run(embeds[None], axes[:, None], visible[None], remember)

    def _run(self, embeds: Tensor, angles: Tensor, visible: Tensor, remember: Remember) -> Tensor:
        """Layers and the last norm; ``visible`` [n, t, seen] says what each position looks at."""
        rotary = self._model.rotary_emb(embeds, angles)
        mask = torch.where(visible[:, None], 0.0, -torch.inf).to(embeds.dtype)
        hidden: Tensor = self._model.norm(run_layers(self._model.layers, embeds, rotary, mask, remember))
        return hidden

    def write(self, slot: int, embeds: Tensor, axes: Tensor, start: int, *, fixed: bool) -> None:
        """Compute consecutive positions of one slot, for their KV alone.

        Args:
            slot: whose.
            embeds: [t, hidden].
            axes: float32 rope positions [3, t].
            start: where the first one stands.
            fixed: compute a whole piece and look at the whole cache, so that the call's shape is always the same.
        """
        reach = start + len(embeds)
        if fixed:
            # The padding writes behind the others, where later positions overwrite it before anyone looks.
            missing = min(PREFILL_CHUNK, self.length - start) - len(embeds)
            embeds, axes, reach = F.pad(embeds, (0, 0, 0, missing)), F.pad(axes, (0, missing)), self.length
        positions = torch.arange(start, start + len(embeds), device=embeds.device)[None]
        self.forward(embeds[None], axes[:, None], positions, range(slot, slot + 1), reach)


@dataclass(frozen=True, slots=True)
class RopeRows:
    """A piece of a prompt, or all of it, for a decoder with several rope axes: what ``SlotModel.encode`` gives.

    Attributes:
        embeds: [n, hidden].
        axes: float32 [3, n] rope positions.
        delta: rope position minus place in the sequence, behind the prompt.
    """

    embeds: Tensor
    axes: Tensor
    delta: float

    def __len__(self) -> int:
        return len(self.embeds)

    def __getitem__(self, piece: slice) -> "RopeRows":
        return RopeRows(self.embeds[piece], self.axes[:, piece], self.delta)


class FrameDecoder:
    """A decoder of transformers over the few positions of one code frame, the same ones in every row."""

    def __init__(self, model: Any) -> None:
        """Start a frame of an upstream model; it is not changed."""
        self._model = model
        self._seen = 0
        self._past: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        """Compute the next positions.

        Args:
            x: [n, t, hidden]; t may exceed 1 in the first call only.

        Returns:
            Hidden state after the last norm, of the last position: [n, hidden].
        """
        t = x.shape[1]
        assert t == 1 or not self._seen
        where = torch.arange(self._seen, self._seen + t, device=x.device)[None]
        mask = None if t == 1 else torch.full((t, t), -torch.inf, dtype=x.dtype, device=x.device).triu(1)[None, None]
        self._seen += t
        hidden = run_layers(self._model.layers, x, self._model.rotary_emb(x, where), mask, self._remember)
        last: Tensor = self._model.norm(hidden)[:, -1]
        return last

    def _remember(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        if layer == len(self._past):
            self._past.append((k, v))
        else:
            keys, values = self._past[layer]
            self._past[layer] = (torch.cat((keys, k), 2), torch.cat((values, v), 2))
        return self._past[layer]
