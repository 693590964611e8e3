"""The thinker computed by vLLM: what vLLM does not do. Imports no vLLM.

Upstream is vLLM's ``Qwen3OmniMoeThinkerForConditionalGeneration``; it loads the whole checkpoint and skips talker and
code2wav.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_ray.engine.types import Chunk
from omni_ray.engine.vllm_model import VLLMCheckpoint, VLLMModel, VLLMPrompt
from omni_ray.engine.vllm_options import VLLMOptions
from omni_ray.errors import InvalidRequestError
from omni_ray.models.qwen3_omni.stage_checkpoint import stage_checkpoint
from omni_ray.models.qwen3_omni.thinker_text import ThinkerText


class Qwen3OmniThinkerVLLM(VLLMModel):
    """``ChatPrompt`` in, text out, and what ``Qwen3OmniThinker`` gives out besides."""

    def load(self) -> VLLMCheckpoint:
        """See ``VLLMModel.load``."""
        options = self.context.options
        assert isinstance(options, VLLMOptions)
        directory, config = stage_checkpoint(self.context, lambda whole: whole.thinker_config.text_config, speaks=False)
        self._text = ThinkerText(directory, config, options.max_model_len)
        self.stop_ids = self._text.stop_ids
        return VLLMCheckpoint(directory, limit_mm_per_prompt={"audio": 0, "image": 0, "video": 0})

    def encode(self, prompt: Any) -> VLLMPrompt:
        """See ``VLLMModel.encode``."""
        made = self._text.encode(prompt)
        if prompt.media():
            raise InvalidRequestError("this server's thinker takes text only", "messages")
        return VLLMPrompt(made.ids, made.ids, source=made)

    def detokenize(self, token_id: int) -> bytes:
        """See ``VLLMModel.detokenize``."""
        return self._text.detokenize(token_id)

    def prompt_outputs(self, prompt: VLLMPrompt, rows: NDArray[np.float32] | None, limit: int) -> Sequence[Chunk]:
        """See ``VLLMModel.prompt_outputs``."""
        return [replace(self._text.asked(prompt.source, 0), limit=limit)]
