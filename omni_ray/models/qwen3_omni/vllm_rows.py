"""The thinker as vLLM computes it, with the hidden rows that the talker hears. Imported in vLLM's processes only.

Upstream is vLLM's ``Qwen3OmniMoeThinkerForConditionalGeneration``.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_omni_moe_thinker import Qwen3OmniMoeThinkerForConditionalGeneration

from omni_ray.engine.vllm_compat import RowKeeper


class Qwen3OmniThinkerWithRows(Qwen3OmniMoeThinkerForConditionalGeneration):  # type: ignore[misc]
    """``Qwen3OmniMoeThinkerForConditionalGeneration``, which also keeps what the talker hears of media.

    That is transformers' ``hidden_states[accept_hidden_layer]``: the output of the layer before, without what deepstack
    adds to it. What is computed, loaded and sampled is upstream's.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config: Any = vllm_config.model_config.hf_config
        thinker = config.thinker_config
        self.row_keeper = RowKeeper(
            self.language_model.model.layers[config.talker_config.accept_hidden_layer - 1],
            width=thinker.text_config.hidden_size,
            longest=vllm_config.scheduler_config.max_num_batched_tokens,
            dtype=vllm_config.model_config.dtype,
            media=(thinker.audio_token_id, thinker.image_token_id, thinker.video_token_id),
        )

    def compute_logits(self, hidden_states: Tensor) -> torch.Tensor | None:
        """Upstream's; called once after every pass, outside of any graph."""
        self.row_keeper.collect()
        logits: Tensor | None = super().compute_logits(hidden_states)
        return logits
