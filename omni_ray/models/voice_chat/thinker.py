"""The thinker: SmolLM2-135M-Instruct in torch, over static KV slots with one position per row.

Weights, tokenizer and chat template come from transformers, the forward pass from ``slot_llama``.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

from omni_ray.engine.ar_loop import PREFILL_CHUNK
from omni_ray.engine.ar_model import ARModel
from omni_ray.engine.options import AROptions
from omni_ray.errors import ConfigError
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
        self._llama = SlotLlama(model, options.max_num_seqs, options.max_model_len)
        self._warm_up()

    def encode(self, prompt: Any) -> list[int]:
        """Token ids of the chat in SmolLM2's template, up to where the assistant speaks."""
        assert isinstance(prompt, Prompt)
        messages = [{"role": role, "content": text} for role, text in prompt.with_system()]
        encoded = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        return list(encoded["input_ids"])

    def detokenize(self, token_id: int) -> bytes:
        """See ``ARModel.detokenize``."""
        return self._bytes[token_id]

    def begin(self, slot: int, ids: Sequence[int]) -> int:
        """Copy the default system prompt's KV into the slot if ``ids`` begin with that prompt."""
        prefix = len(self._prefix)
        if not prefix or len(ids) <= prefix or list(ids[:prefix]) != self._prefix:
            return 0
        start = slot * self._llama.length
        self._llama.kv[:, start : start + prefix] = self._prefix_kv
        return prefix

    def prefill(self, slot: int, ids: Sequence[int], start: int) -> Tensor:
        """See ``ARModel.prefill``."""
        end = start + len(ids)
        last = len(ids) - 1
        reach = end
        if self._deterministic:
            # The padding writes beyond the prompt, where the answer will overwrite it before anyone looks.
            ids = [*ids, *[0] * (min(PREFILL_CHUNK, self._llama.length - start) - len(ids))]
            reach = self._llama.length
        positions = torch.arange(start, start + len(ids))[None]
        hidden = self._llama.forward(torch.tensor([ids]), positions, range(slot, slot + 1), reach)
        return self._llama.logits(hidden[0, last])

    def step(self, slots: Sequence[int], last_ids: Sequence[int], positions: Sequence[int]) -> Tensor:
        """See ``ARModel.step``.

        Free slots and slots with an unfinished prompt between the first and the last one are computed too and thrown
        away, which is cheaper than gathering KV. They write at a slot's last position: no request gets that far,
        because its last token is never computed.
        """
        length = self._llama.length
        rows = range(self._llama.slots) if self._deterministic else range(slots[0], slots[-1] + 1)
        reach = length if self._deterministic else max(positions) + 1
        ids, where = [0] * len(rows), [length - 1] * len(rows)
        taken = [slot - rows.start for slot in slots]
        for row, token, position in zip(taken, last_ids, positions, strict=True):
            ids[row], where[row] = token, position
        hidden = self._llama.forward(torch.tensor(ids)[:, None], torch.tensor(where)[:, None], rows, reach)
        logits = self._llama.logits(hidden[:, 0])
        return logits if len(taken) == len(rows) else logits[taken]

    def release(self, slot: int) -> None:
        """Nothing to free: the slot's next request overwrites it."""

    def _warm_up(self) -> None:
        """Compute the default system prompt's KV once, and run every batch size."""
        self._prefix: list[int] = []
        one, two = self.encode(Prompt((("user", "a"),))), self.encode(Prompt((("user", "1"),)))
        shared = next(i for i, (x, y) in enumerate(zip(one, two, strict=False)) if x != y)
        self.prefill(0, one[:shared], 0)
        if not self._deterministic:
            self._prefix = one[:shared]
            self._prefix_kv = self._llama.kv[:, :shared].clone()
        for slots in range(1, self._llama.slots + 1):
            self.step(range(slots), [0] * slots, [shared] * slots)


def compute_dtype(option: str) -> torch.dtype:
    """``auto`` is bfloat16 where the CPU multiplies it natively (half the bytes per token), else float32."""
    if option == "auto":
        capabilities = torch.cpu.get_capabilities()
        native = any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
        option = "bfloat16" if native else "float32"
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[option]


def _weights(directory: Path, dtype: torch.dtype) -> Any:
    """The checkpoint as transformers loads it; a missing tensor is an error, not a random one."""
    model, info = LlamaForCausalLM.from_pretrained(directory, dtype=dtype, output_loading_info=True)
    if info["missing_keys"]:
        raise ConfigError([f"{directory}: tensors are missing: {', '.join(sorted(info['missing_keys']))}"])
    return model


def stop_ids(directory: Path, tokenizer: Any) -> frozenset[int]:
    """Every token that any file of the checkpoint calls an end (cases.md C24).

    The union of ``eos_token_id`` (one or a list) in config.json and generation_config.json, the tokenizer's, and the
    special token that the chat template puts behind an assistant's message.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (directory / name).is_file():
            value = json.loads((directory / name).read_text()).get("eos_token_id")
            found.update([value] if isinstance(value, int) else value or [])
    if tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    if tokenizer.chat_template:
        mark = "omni"
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
        behind = tokenizer.apply_chat_template(chat, tokenize=False).rpartition(mark)[2]
        ids = tokenizer(behind, add_special_tokens=False)["input_ids"]
        found.update([token for token in ids if token in tokenizer.all_special_ids][:1])
    return frozenset(found)


def token_bytes(tokenizer: Any) -> list[bytes]:
    """UTF-8 bytes of every token of a byte-level BPE tokenizer, by id; empty for special tokens.

    Byte-level BPE writes each byte as one printable character (GPT-2, Radford et al. 2019, ``bytes_to_unicode``):
    printable Latin-1 bytes as themselves, the others as U+0100 onwards in order.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = (byte for byte in range(256) if byte not in plain)
    byte_of = {chr(byte): byte for byte in plain} | {chr(0x100 + i): byte for i, byte in enumerate(moved)}
    added = tokenizer.added_tokens_decoder
    table = [b""] * len(tokenizer)
    for token, index in tokenizer.get_vocab().items():
        if index in added:
            table[index] = b"" if added[index].special else token.encode()
        else:
            table[index] = bytes(byte_of[character] for character in token)
    return table
