"""Tokenizers of made checkpoints of Qwen's models: transformers' ``Qwen2Tokenizer`` over given or trained merges."""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

from omni_ray.errors import ConfigError

END: Final = "<|endoftext|>"
TURN_END: Final = "<|im_end|>"

Merges = Sequence[tuple[str, str]]


def trained_merges(texts: Sequence[str], size: int) -> tuple[dict[str, int], Merges]:
    """Vocabulary and merges of a byte-level BPE of ``size`` tokens that ``texts`` train."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(texts, trainer)
    bpe = json.loads(trained.to_str())["model"]
    return bpe["vocab"], [tuple(merge) for merge in bpe["merges"]]


def qwen2_tokenizer(
    vocabulary: dict[str, int],
    merges: Merges,
    added: Sequence[str],
    plain: Collection[str],
    named: Mapping[str, str],
    template: str,
) -> Any:
    """A ``Qwen2Tokenizer`` that ends turns with ``<|im_end|>``.

    Args:
        vocabulary: of the merges.
        merges: in rank order.
        added: tokens behind the vocabulary, in order; ``<|endoftext|>`` is the first.
        plain: those of them that are text to a reader; all others are special.
        named: what multimodal processors (transformers', vLLM's) look up on the tokenizer.
        template: of chats.
    """
    # The end token is `<|endoftext|>` while the others are added: naming another one here would give it the first id.
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=list(merges), unk_token=None, bos_token=None, eos_token=END, pad_token=END
    )
    tokenizer.add_tokens([AddedToken(token, special=token not in plain, normalized=False) for token in added])
    tokenizer.eos_token = TURN_END
    tokenizer.chat_template = template
    # Named only now: tokens must exist, or ids shift.
    tokenizer.init_kwargs.update(named)
    tokenizer.init_kwargs["extra_special_tokens"] = dict(named)
    return tokenizer


def token_id(tokenizer: Any, text: str) -> int:
    """The id of ``text``, which must be one token.

    Raises:
        ConfigError: it is several.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    if len(ids) != 1:
        raise ConfigError([f"{text!r} must be one token, but this tokenizer gives {ids}"])
    return int(ids[0])
