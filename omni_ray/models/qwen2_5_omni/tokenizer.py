"""The tokenizer of the tiny checkpoint: byte-level BPE with the special tokens of published ones, in their order."""

from typing import Any, Final

from omni_ray.engine.transformers_qwen_tokenizer import qwen2_tokenizer, trained_merges
from omni_ray.models.qwen2_5_omni.prompt import CHAT_TEMPLATE

VOCABULARY: Final = 440
TRAINING: Final = (
    *("system\nuser\nassistant\n",) * 200,
    *("You are a helpful assistant. Hello, how are you today? Count: one two three four five. Please describe this.",)
    * 20,
)
"""Roles are frequent enough to become one token each."""
PLAIN_TOKENS: Final = frozenset(("<tool_call>", "</tool_call>"))
SPECIAL_TOKENS: Final = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>",
    "<|vision_bos|>", "<|vision_eos|>", "<|vision_pad|>", "<|IMAGE|>", "<|VIDEO|>", "<tool_call>", "</tool_call>",
)  # fmt: skip
ATTRIBUTES: Final = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
"""What upstream's processor looks up on the tokenizer."""


def tiny_tokenizer() -> Any:
    """Some 450 tokens; roles and the newline are one token each."""
    vocabulary, merges = trained_merges(TRAINING, VOCABULARY)
    return qwen2_tokenizer(vocabulary, merges, SPECIAL_TOKENS, PLAIN_TOKENS, ATTRIBUTES, CHAT_TEMPLATE)
