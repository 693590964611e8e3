"""A tokenizer of bytes for tiny random checkpoints: made on the spot, nothing is downloaded."""

from collections.abc import Sequence
from typing import Any


def byte_backend(control: Sequence[str], *, first: bool = False) -> Any:
    """A ``tokenizers.Tokenizer``: a token for each byte, and ``control``, which no text is split into.

    Args:
        control: tokens of the published tokenizer that stand for no text.
        first: give them the lowest ids, before the bytes; else the highest.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = [*control, *letters] if first else letters
    backend = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(known)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return backend
