"""CSM's depth decoder: the codes of a frame behind the first, one small step each.

Weights, norms, rotary tables and MLPs are transformers' ``CsmDepthDecoderForCausalLM``; ours is the loop, which
upstream leaves to a nested ``generate``.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from omni_ray.engine.slot_decoder import FrameDecoder


class DepthDecoder:
    """Completes frames."""

    def __init__(self, depth_decoder: Any) -> None:
        """Take over an upstream ``CsmDepthDecoderForCausalLM``; it is not changed."""
        self._model = depth_decoder.model
        self._heads: Tensor = depth_decoder.codebooks_head.weight
        """[codebooks - 1, hidden, vocabulary]"""

    def complete(self, hidden: Tensor, first: Tensor, choose: Callable[[int, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Predict the residual codes of one frame in n rows.

        Args:
            hidden: [n, backbone hidden], from which the first code was drawn.
            first: int64 [n], the first code.
            choose: (codebook, float32 logits [n, vocabulary]) -> codes int64 [n].

        Returns:
            All codes int64 [n, codebooks], and the last hidden state [n, hidden].
        """
        model, decoder = self._model, FrameDecoder(self._model)
        codes, last = [first], hidden
        x = hidden[:, None]
        for codebook, head in enumerate(self._heads, start=1):
            before = model.embed_tokens(codes[-1] + (codebook - 1) * model.vocab_size)[:, None]
            x = torch.cat((x, before), 1) if codebook == 1 else before
            last = decoder.forward(model.inputs_embeds_projector(x))
            codes.append(choose(codebook, linear(last, head.T).float()))
        return torch.stack(codes, 1), last
