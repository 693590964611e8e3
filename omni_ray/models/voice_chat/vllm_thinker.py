"""The thinker computed by vLLM: SmolLM2's chat template and bytes. Imports no vLLM.

The forward pass is vLLM's ``LlamaForCausalLM``, the tokenizer transformers'. A template for any text model with a
byte-level tokenizer.
"""

from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from omni_ray.engine.text_tokens import stop_ids, token_bytes
from omni_ray.engine.vllm_model import VLLMCheckpoint, VLLMModel, VLLMPrompt
from omni_ray.errors import ConfigError
from omni_ray.models.voice_chat.prompt import Prompt
from omni_ray.models.voice_chat.thinker import SUBFOLDER, chat_ids


class SmolLM2ThinkerVLLM(VLLMModel):
    """``Prompt`` in, assistant text out; see ``SmolLM2Thinker``."""

    def load(self) -> VLLMCheckpoint:
        """See ``VLLMModel.load``."""
        if self.context.model is None:
            raise ConfigError([f"stage {self.context.stage.name} needs a model directory"])
        directory = Path(self.context.model) / SUBFOLDER
        if not directory.is_dir():
            raise ConfigError([f"model: {str(directory)!r} is no directory on this node"])
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._bytes = token_bytes(self._tokenizer)
        self.stop_ids = stop_ids(directory, self._tokenizer)
        return VLLMCheckpoint(directory)

    def encode(self, prompt: Any) -> VLLMPrompt:
        """See ``VLLMModel.encode``."""
        assert isinstance(prompt, Prompt)
        return VLLMPrompt.of_text(chat_ids(self._tokenizer, prompt))

    def detokenize(self, token_id: int) -> bytes:
        """See ``VLLMModel.detokenize``."""
        return self._bytes[token_id]
