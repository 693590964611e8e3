"""Higgs Audio v2's decoder as ``SlotDecoder`` takes one: every layer has norms and MLPs for text, and others for sound.

All modules are upstream's ``HiggsAudioV2Model``'s; ours is only which of the two a position goes through.
"""

from typing import Any

import torch
from torch import Tensor


class DualFFN:
    """An upstream ``HiggsAudioV2Model`` in the shape of a Llama.

    Attributes:
        sound: which positions of the coming call are sound: all, none, or bool [n, t].
    """

    def __init__(self, model: Any) -> None:
        """Take over an upstream model; it is not changed."""
        self.config, self.norm, self.rotary_emb = model.config, model.norm, model.rotary_emb
        self.layers = [DualLayer(layer, self) for layer in model.layers]
        self.sound: bool | Tensor = True

    def choose(self, text: Any, sound: Any, x: Tensor) -> Tensor:
        """Each position [n, t, hidden] through its own of two modules."""
        if isinstance(self.sound, bool):
            chosen: Tensor = sound(x) if self.sound else text(x)
            return chosen
        return torch.where(self.sound[..., None], sound(x), text(x))


class DualLayer:
    """One layer, with the names of Llama's."""

    def __init__(self, layer: Any, model: DualFFN) -> None:
        self.self_attn = layer.self_attn
        self._layer, self._model = layer, model

    def input_layernorm(self, x: Tensor) -> Tensor:
        """[n, t, hidden] -> the same shape."""
        return self._model.choose(self._layer.input_layernorm, self._layer.audio_input_layernorm, x)

    def post_attention_layernorm(self, x: Tensor) -> Tensor:
        """[n, t, hidden] -> the same shape."""
        layer = self._layer
        return self._model.choose(layer.post_attention_layernorm, layer.audio_post_attention_layernorm, x)

    def mlp(self, x: Tensor) -> Tensor:
        """[n, t, hidden] -> the same shape."""
        return self._model.choose(self._layer.mlp, self._layer.audio_mlp, x)
