"""The thinker without its weights: its tokenizer, its prompts, and which of its tokens are not spoken.

Shared by what computes it: our torch model and vLLM.
"""

import threading
from pathlib import Path
from typing import Any, Final

from transformers import AutoTokenizer

from omni_ray.engine.text_tokens import stop_ids, token_bytes
from omni_ray.engine.types import PromptChunk
from omni_ray.errors import ConfigError
from omni_ray.models.qwen3_omni.media import MediaReader
from omni_ray.models.qwen3_omni.prompt import ChatPrompt
from omni_ray.models.qwen3_omni.thinker_prompt import PromptMaker, ThinkerPrompt

SILENT_SPANS: Final = (("<tool_call>", "</tool_call>"), ("<think>", "</think>"))
"""Tokens around what is written but not spoken (cases.md C40)."""


class ThinkerText:
    """Reads a checkpoint's files except its weights.

    Attributes:
        capture: layers behind which hidden rows of media are taken; None where no talker hears them.
        stop_ids: see ``ARModel.stop_ids``.
    """

    def __init__(self, directory: Path, config: Any, max_model_len: int) -> None:
        """Read the files.

        Args:
            directory: of the checkpoint.
            config: transformers' ``Qwen3OmniMoeConfig`` of it.
            max_model_len: positions of a prompt and its answer.

        Raises:
            ConfigError: the talker listens to no inner layer.
        """
        self.capture: int | None = config.talker_config.accept_hidden_layer if config.enable_audio_output else None
        if self.capture is not None and not 0 < self.capture < config.thinker_config.text_config.num_hidden_layers:
            raise ConfigError([f"{directory}: talker_config.accept_hidden_layer {self.capture} is no inner layer"])
        tokenizer: Any = AutoTokenizer.from_pretrained(directory)
        self.stop_ids = stop_ids(directory, tokenizer)
        self._bytes = token_bytes(tokenizer)
        self._maker = PromptMaker(tokenizer, config, MediaReader(directory), max_model_len)
        self._encoding = threading.Lock()
        self._silent = frozenset(tokenizer.all_special_ids) | {
            index for index, token in tokenizer.added_tokens_decoder.items() if token.special
        }
        known = tokenizer.get_vocab()
        self._spans = tuple((known[first], known[last]) for first, last in SILENT_SPANS if first in known)

    def encode(self, prompt: Any) -> ThinkerPrompt:
        """Tokens, features and positions of a ``ChatPrompt``; any thread may call it."""
        assert isinstance(prompt, ChatPrompt)
        with self._encoding:  # tokenizers change their own state for truncation and padding
            return self._maker.make(prompt)

    def detokenize(self, token_id: int) -> bytes:
        """See ``ARModel.detokenize``; the output projection has more rows than the tokenizer has tokens."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def asked(self, prompt: ThinkerPrompt, rows: int) -> PromptChunk:
        """What was asked, for the talker; ``rows`` hidden rows follow."""
        grids = tuple((grid.time, grid.height, grid.width, grid.seconds) for grid in prompt.user_grids)
        return PromptChunk(0, tuple(prompt.ids), grids, rows, silent=self._silent, silent_spans=self._spans)
