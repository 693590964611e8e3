"""The thinker: SmolLM2-135M-Instruct in torch, over static KV slots with one position per row.

Weights, tokenizer and chat template come from transformers, the forward pass from ``slot_llama``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from omni_ray.engine.ar_model import ARModel, Probe
from omni_ray.engine.options import AROptions
from omni_ray.engine.precision import compute_dtype
from omni_ray.engine.text_tokens import stop_ids, token_bytes
from omni_ray.errors import ConfigError, InvalidRequestError
from omni_ray.models.voice_chat.prompt import Prompt
from omni_ray.models.voice_chat.slot_llama import SlotLlama

SUBFOLDER: Final = "thinker"


class SmolLM2Thinker(ARModel):
    """``Prompt`` in, assistant text out.

    Deterministic mode gives every call a fixed shape: decode over all slots, prompts in padded pieces, attention over
    the whole cache length, and no reuse of the system prompt's KV.
    """

    def load(self) -> None:
        """Load the checkpoint in ``<model directory>/thinker`` and warm up.

        Raises:
            ConfigError: no model directory, a tensor is missing, or ``max_model_len`` exceeds the checkpoint's.
        """
        options = self.context.options
        assert isinstance(options, AROptions)
        if self.context.model is None:
            raise ConfigError([f"stage {self.context.stage.name} needs a model directory"])
        directory = Path(self.context.model) / SUBFOLDER
        torch.set_num_threads(options.threads)
        self._deterministic = options.deterministic
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        self._bytes = token_bytes(self._tokenizer)
        self.stop_ids = stop_ids(directory, self._tokenizer)
        config = AutoConfig.from_pretrained(directory)
        if options.max_model_len > config.max_position_embeddings:
            longest = config.max_position_embeddings
            raise ConfigError([f"max_model_len: {options.max_model_len} is beyond the checkpoint's {longest}"])
        dtype = compute_dtype(options.dtype)
        model = (
            LlamaForCausalLM(config).to(dtype) if self.context.load_format == "dummy" else _weights(directory, dtype)
        )
        self._llama = SlotLlama(model, options.max_num_seqs, options.max_model_len, options.deterministic)
        self._warm_up()

    def encode(self, prompt: Any) -> list[int]:
        """Token ids of the chat in SmolLM2's template, up to where the assistant speaks."""
        assert isinstance(prompt, Prompt)
        return chat_ids(self._tokenizer, prompt)

    def detokenize(self, token_id: int) -> bytes:
        """See ``ARModel.detokenize``."""
        return self._bytes[token_id]

    def begin(self, slot: int, ids: Sequence[int]) -> int:
        """Copy the default system prompt's KV into the slot if ``ids`` begin with that prompt."""
        prefix = len(self._prefix)
        if not prefix or len(ids) <= prefix or list(ids[:prefix]) != self._prefix:
            return 0
        self._llama.kv[:, slot, :, :prefix] = self._prefix_kv
        return prefix

    def prefill(self, slot: int, ids: Sequence[int], start: int) -> Tensor:
        """See ``ARModel.prefill``."""
        return self._llama.prefill(slot, ids, start)

    def step(self, slots: Sequence[int], last_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """See ``ARModel.step``."""
        return self._llama.step(slots, last_ids, positions)

    def kv_bytes(self) -> int:
        """See ``SlotModel.kv_bytes``."""
        return int(self._llama.kv.nbytes)

    def release(self, slot: int) -> None:
        """Nothing to free: the slot's next request overwrites it."""

    def probes(self) -> list[Probe]:
        """Short chats of different lengths, as far as they fit."""
        asked = ("Hello!", "What is the capital of France?", "Count from one to ten, please, and then back to one.")
        chats = [Prompt((("user", text),)) for text in asked]
        assert isinstance(self.context.options, AROptions)
        room = self.context.options.max_model_len - 8
        return [Probe(chat) for chat in chats if len(self.encode(chat)) < room]

    def _warm_up(self) -> None:
        """Compute the default system prompt's KV once, and run every batch size."""
        self._prefix: list[int] = []
        one, two = self.encode(Prompt((("user", "a"),))), self.encode(Prompt((("user", "1"),)))
        shared = next(i for i, (x, y) in enumerate(zip(one, two, strict=False)) if x != y)
        self.prefill(0, one[:shared], 0)
        if not self._deterministic:
            self._prefix = one[:shared]
            self._prefix_kv = self._llama.kv[:, 0, :, :shared].clone()
        for slots in range(1, self._llama.slots + 1):
            self.step(range(slots), [0] * slots, [shared] * slots)


def chat_ids(tokenizer: Any, prompt: Prompt) -> list[int]:
    """Token ids of a chat in SmolLM2's template, up to where the assistant speaks.

    Raises:
        InvalidRequestError: a text holds a token that begins or ends a turn, and would forge one.
    """
    for token in tokenizer.all_special_tokens:
        if any(token in text for _, text in prompt.messages):
            raise InvalidRequestError(f"a text holds the reserved token {token!r}", "messages")
    messages = [{"role": role, "content": text} for role, text in prompt.with_system()]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return list(encoded["input_ids"])


def _weights(directory: Path, dtype: torch.dtype) -> Any:
    """The checkpoint as transformers loads it; a missing tensor is an error, not a random one."""
    model, info = LlamaForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    if info["missing_keys"]:
        raise ConfigError([f"{directory}: tensors are missing: {', '.join(sorted(info['missing_keys']))}"])
    return model
