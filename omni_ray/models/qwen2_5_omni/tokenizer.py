"""The tokenizer of the tiny checkpoint: byte-level BPE with the special tokens of published ones, in their order.

transformers' ``Qwen2Tokenizer`` is its class, as in published ones.
"""

import json
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

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


def token_id(tokenizer: Any, text: str) -> int:
    """The id of ``text``, which must be one token."""
    (token,) = tokenizer.encode(text, add_special_tokens=False)
    return int(token)


def tiny_tokenizer() -> Any:
    """Some 450 tokens; roles and the newline are one token each."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(TRAINING, trainer)
    bpe = json.loads(trained.to_str())["model"]
    end = SPECIAL_TOKENS[0]
    tokenizer = Qwen2Tokenizer(
        vocab=bpe["vocab"],
        merges=[tuple(merge) for merge in bpe["merges"]],
        unk_token=None,
        bos_token=None,
        eos_token=end,
        pad_token=end,
    )
    tokenizer.add_tokens([AddedToken(t, special=t not in PLAIN_TOKENS, normalized=False) for t in SPECIAL_TOKENS])
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = CHAT_TEMPLATE
    # Named only now: tokens must exist, or ids shift.
    tokenizer.init_kwargs.update(ATTRIBUTES)
    tokenizer.init_kwargs["extra_special_tokens"] = ATTRIBUTES
    return tokenizer
