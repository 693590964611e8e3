"""The talker's code predictor, which completes its frames.

Weights, norms, rotary tables, MLPs and projections are transformers' modules (``qwen3_omni_moe``); ours is only the
loop over the codes of a frame, which upstream leaves to a nested ``generate``, and the attention in it.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from transformers import Qwen3OmniMoeTalkerForConditionalGeneration

from omni_ray.engine.slot_decoder import FrameDecoder
from omni_ray.engine.transformers_build import build
from omni_ray.models.qwen3_omni.weights import initialise_experts

PREDICTOR_TOP_K: Final = 50
PREDICTOR_TOP_P: Final = 0.8
"""Hard-coded upstream, as is temperature 1; greedy exactly when codebook 0 is."""


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
        decoder = FrameDecoder(self._model)
        x = torch.stack((hidden, first), 1)
        codes, embeds = [], [first]
        for group, (head, embedding) in enumerate(zip(self._heads, self._embeddings, strict=True)):
            out = decoder.forward(x)
            codes.append(choose(group + 1, head(out).float()))
            embeds.append(embedding(codes[-1]))
            x = embeds[-1][:, None]
        return torch.stack(codes, 1), torch.stack(embeds, 1).sum(1), out


def talker_module(config: Any, dtype: torch.dtype, deterministic: bool, random: bool, device: torch.device) -> Any:
    """The module of transformers; its weights are to be filled, or are random."""
    grouped = device.type == "cuda" and dtype == torch.bfloat16  # no wait for the GPU in every layer
    module = build(
        Qwen3OmniMoeTalkerForConditionalGeneration,
        config,
        dtype,
        initialise=random,
        experts="batched_mm" if deterministic else "grouped_mm" if grouped else "eager",
    )
    if random:
        initialise_experts(module, config.initializer_range)
    return module
