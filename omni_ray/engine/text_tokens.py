"""What every text model's tokenizer must answer: each token's bytes, and which tokens end an answer.

Works on a transformers tokenizer, or its ``decode``, given to it; imports nothing of that package.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

MOST_WAITING: Final = 64
"""Tokens that may wait to become text: many more than a character has."""


def stop_ids(directory: Path, tokenizer: Any) -> frozenset[int]:
    """Every token that any file of the checkpoint calls an end (cases.md C24).

    The union of ``eos_token_id`` (one or a list) in config.json (its ``text_config`` too) and generation_config.json,
    the tokenizer's, and the special token that the chat template puts behind an assistant's message.
    """
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        if (directory / name).is_file():
            content = json.loads((directory / name).read_text())
            for part in (content, content.get("text_config") or {}):
                value = part.get("eos_token_id")
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


class TokenStream:
    """One answer's tokens as text, for any tokenizer: give it each token, in order.

    A token's text may depend on its neighbours (SentencePiece drops the first space, parts of a character decode to
    nothing sensible), so a few last tokens are decoded with and without the new one, as Hugging Face's
    text-generation-inference and vLLM do. What ends in an unfinished character waits for the next token, but not for
    ever: all that waits is decoded with every token, and a client can ask for thousands that are no text.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        """``decode`` gives the text of a list of tokens."""
        self._decode = decode
        self._ids: list[int] = []  # those of the last text given out, then those that wait
        self._given = 0

    def __call__(self, token_id: int) -> bytes:
        """UTF-8 bytes of the text that this token makes certain."""
        self._ids.append(token_id)
        before, text = self._decode(self._ids[: self._given]), self._decode(self._ids)
        waits = len(text) <= len(before) or text.endswith("\ufffd")
        if waits and len(self._ids) - self._given < MOST_WAITING:
            return b""
        self._ids = self._ids[self._given :]
        self._given = len(self._ids)
        return text[len(before) :].encode()


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
