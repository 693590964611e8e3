"""The thinker as vLLM computes it, with the hidden rows that the talker hears. Imported only where vLLM runs.

Upstream is vLLM's ``Qwen3OmniMoeThinkerForConditionalGeneration``.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3OmniMoeProcessor
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_omni_moe_thinker import (
    Qwen3OmniMoeThinkerDummyInputsBuilder,
    Qwen3OmniMoeThinkerForConditionalGeneration,
    Qwen3OmniMoeThinkerMultiModalProcessor,
    Qwen3OmniMoeThinkerProcessingInfo,
)
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.transformers_utils.processor import cached_processor_from_config

from omni_ray.engine.vllm_compat import RowKeeper
from omni_ray.models.qwen3_omni.positions import Grid, RopeLayout, rope_positions


class OneProcessor(Qwen3OmniMoeThinkerProcessingInfo):  # type: ignore[misc]
    """``Qwen3OmniMoeThinkerProcessingInfo``, but a process loads the checkpoint's processor once.

    Upstream's gives vLLM's tokenizer to ``from_pretrained``. That reads its own all the same, copies the other's whole
    vocabulary into several places, and is called again for every tokenizer object: seconds of each start.
    """

    def get_hf_processor(self, **kwargs: object) -> Qwen3OmniMoeProcessor:
        """The process's only one, with the tokenizer of this context as upstream's."""
        processor: Qwen3OmniMoeProcessor = cached_processor_from_config(
            self.ctx.model_config, processor_cls=Qwen3OmniMoeProcessor, **kwargs
        )
        processor.tokenizer = self.ctx.get_tokenizer()
        return processor


@MULTIMODAL_REGISTRY.register_processor(
    Qwen3OmniMoeThinkerMultiModalProcessor, info=OneProcessor, dummy_inputs=Qwen3OmniMoeThinkerDummyInputsBuilder
)
class Qwen3OmniThinkerWithPositions(Qwen3OmniMoeThinkerForConditionalGeneration):  # type: ignore[misc]
    """``Qwen3OmniMoeThinkerForConditionalGeneration`` with transformers' positions of images.

    vLLM 0.26 shifts them by a token behind the image's mark; 0.32 does not.
    """

    def get_mrope_input_positions(self, input_tokens: Sequence[int], mm_features: Any) -> tuple[Tensor, int]:
        """Positions int64 [3, n] of a prompt without videos, and what is added behind it; see ``rope_positions``.

        Args:
            input_tokens: ids [n], placeholders expanded. Where media are, ``mm_features`` says.
            mm_features: vLLM's ``MultiModalFeatureSpec`` of each medium.
        """
        config = self.config
        merge = config.vision_config.spatial_merge_size
        layout = RopeLayout(
            config.audio_token_id,
            config.image_token_id,
            config.video_token_id,
            config.position_id_per_seconds,
            merge,
        )
        ids = np.full(len(input_tokens), -1)
        grids = []
        for offset, modality, data in self.iter_mm_features(mm_features):
            if modality == "image":
                grids.append(Grid(data["grid_t"], data["grid_h"] * merge, data["grid_w"] * merge))
                ids[offset : offset + grids[-1].tokens(merge)] = layout.image
        places = rope_positions(ids.tolist(), grids, layout)
        return torch.from_numpy(places.axes.astype(np.int64)), int(places.delta)


class Qwen3OmniThinkerWithRows(Qwen3OmniThinkerWithPositions):
    """The same, which also keeps what the talker hears of media.

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
