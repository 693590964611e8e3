"""The thinker computed by vLLM: the checkpoint's chat template and tokenizer. Imports no vLLM."""

import threading
from collections.abc import Callable
from typing import Any

from omni_ray.engine.checkpoint_files import stage_directory
from omni_ray.engine.vllm_model import VLLMCheckpoint, VLLMModel, VLLMPrompt
from omni_ray.errors import InvalidRequestError
from omni_ray.models.any_thinker.chat import ChatReader
from omni_ray.models.any_thinker.checkpoint_config import max_positions, read_config
from omni_ray.models.any_thinker.prompt import ChatPrompt


class AnyThinkerVLLM(VLLMModel):
    """``ChatPrompt`` in, text out; see ``AnyThinker``. Text alone: media are refused."""

    def load(self) -> VLLMCheckpoint:
        """See ``VLLMModel.load``."""
        directory = stage_directory(self.context)
        self._chat = ChatReader(directory, False, False)
        self._encoding = threading.Lock()  # tokenizers change their own state for truncation and padding
        self.stop_ids = self._chat.stop_ids
        return VLLMCheckpoint(directory, max_positions=max_positions(read_config(directory, trust_remote_code=False)))

    def encode(self, prompt: Any) -> VLLMPrompt:
        """See ``VLLMModel.encode``."""
        assert isinstance(prompt, ChatPrompt)
        if prompt.sounds or prompt.images:
            raise InvalidRequestError("any_thinker takes media on its torch engine alone, not on vLLM", "messages")
        with self._encoding:
            return VLLMPrompt.of_text(self._chat.encode(prompt).ids)

    def detokenize(self, token_id: int) -> bytes:
        """See ``VLLMModel.detokenize``."""
        return self.detokenizer()(token_id)

    def detokenizer(self) -> Callable[[int], bytes]:
        """See ``VLLMModel.detokenizer``."""
        return self._chat.detokenizer()
