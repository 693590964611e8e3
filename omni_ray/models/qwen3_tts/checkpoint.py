"""Makes a tiny random Qwen3-TTS checkpoint for CPU by the classes of the package ``qwen-tts``, which must be installed.

It pins transformers 4.57.3: make it in an environment of the package's own, as the replicas have it.
"""

import json
import math
from pathlib import Path
from typing import Any, Final

CODES: Final = 32
BOOKS: Final = 4
MARKS: Final = ("<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_bos>", "<tts_eos>")


def make_tiny(out: Path, seed: int = 0) -> None:
    """Write a random checkpoint of two speakers, some 0.4 M parameters; equal seeds give equal files.

    Args:
        out: made if need be; files of the same names are replaced.
        seed: of the weights.

    Raises:
        ConfigError: the package is not there.
    """
    import torch

    from omni_ray.models.qwen3_tts.model import upstream_class

    upstream_class()  # says what to do where the package is not
    from qwen_tts.core.models import (  # type: ignore[import-not-found]
        Qwen3TTSConfig,
        Qwen3TTSForConditionalGeneration,
    )
    from qwen_tts.core.tokenizer_12hz import (  # type: ignore[import-not-found]
        configuration_qwen3_tts_tokenizer_v2,
        modeling_qwen3_tts_tokenizer_v2,
    )
    from transformers import EncodecFeatureExtractor

    out.mkdir(parents=True, exist_ok=True)
    config = _config(_tokenizer(out))
    codec_config = configuration_qwen3_tts_tokenizer_v2.Qwen3TTSTokenizerV2Config(**_codec_config())
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = Qwen3TTSForConditionalGeneration(Qwen3TTSConfig(**config)).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)  # wide enough logits that codes differ
        codec = modeling_qwen3_tts_tokenizer_v2.Qwen3TTSTokenizerV2Model(codec_config).eval()
        for name, parameter in codec.decoder.named_parameters():
            if name.endswith("embedding_sum"):
                parameter.normal_()
            elif name.endswith(("layer_scale.scale", "gamma")):
                parameter.fill_(0.5)
            elif parameter.dim() == 3:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
        codes = torch.randint(CODES, (1, BOOKS, 20))
        last = codec.decoder.decoder[-1].conv
        last.bias.zero_()
        while (loudness := float(codec.decoder(codes).square().mean().sqrt())) > 0.3:  # 1 at most: it is clamped
            last.weight.mul_(0.25)
        last.weight.mul_(2.0 ** round(math.log2(0.1 / loudness)))
    model.save_pretrained(out)
    # upstream's own class does not take what it writes for the speaker encoder, which this kind of model lacks
    named = {"architectures": ["Qwen3TTSForConditionalGeneration"], "model_type": "qwen3_tts"}
    (out / "config.json").write_text(json.dumps({**named, **config}, indent=2))
    codec.save_pretrained(out / "speech_tokenizer")
    EncodecFeatureExtractor(sampling_rate=24_000).save_pretrained(out / "speech_tokenizer")


def _config(ids: dict[str, int]) -> dict[str, Any]:
    """The published configuration's layout, with widths divided."""
    layers = {"hidden_size": 48, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    layers |= {"head_dim": 12, "num_code_groups": BOOKS}
    start, end, pad, bos, eos = (ids[mark] for mark in MARKS)
    return {
        "tts_model_type": "custom_voice",
        "tts_model_size": "0b6",
        "tokenizer_type": "qwen3_tts_tokenizer_12hz",
        "im_start_token_id": start,
        "im_end_token_id": end,
        "tts_pad_token_id": pad,
        "tts_bos_token_id": bos,
        "tts_eos_token_id": eos,
        "speaker_encoder_config": {},
        "talker_config": {
            **layers,
            "vocab_size": CODES + 1024,
            "num_hidden_layers": 2,
            "text_hidden_size": 32,
            "text_vocab_size": len(ids),
            "max_position_embeddings": 2048,
            "rope_scaling": {
                "rope_type": "default",
                "type": "default",
                "mrope_section": [2, 2, 2],
                "interleaved": True,
            },
            "codec_eos_token_id": 40,
            "codec_think_id": 41,
            "codec_nothink_id": 42,
            "codec_think_bos_id": 43,
            "codec_think_eos_id": 44,
            "codec_pad_id": 45,
            "codec_bos_id": 46,
            "spk_id": {"vivian": 50, "ryan": 51},
            "spk_is_dialect": {"vivian": False, "ryan": False},
            "codec_language_id": {"english": 60, "chinese": 61},
            "code_predictor_config": {
                **layers,
                "vocab_size": CODES,
                "num_hidden_layers": 1,
                "max_position_embeddings": 64,
            },
        },
    }


def _codec_config() -> dict[str, Any]:
    layers = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 48}
    layers |= {"hidden_size": 32, "codebook_size": CODES, "num_quantizers": BOOKS}
    encoder = {"num_filters": 4, "codebook_dim": 16, "vector_quantization_hidden_dimension": 16, "upsample_groups": 32}
    return {
        "encoder_valid_num_quantizers": BOOKS,
        "encoder_config": {**layers, **encoder, "num_hidden_layers": 1},
        "decoder_config": {**layers, "latent_dim": 32, "num_hidden_layers": 2, "decoder_dim": 64, "codebook_dim": 32},
    }


def _tokenizer(out: Path) -> dict[str, int]:
    """Write a tokenizer of bytes, in which "assistant" is one token: upstream cuts the prompt's ids by number."""
    from tokenizers import pre_tokenizers
    from transformers import Qwen2TokenizerFast

    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    word, merges = "assistant", []
    for length in range(2, len(word) + 1):
        merges.append(f"{word[: length - 1]} {word[length - 1]}")
        vocabulary[word[:length]] = len(vocabulary)
    (out / "vocab.json").write_text(json.dumps(vocabulary))
    (out / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    files = {"vocab_file": str(out / "vocab.json"), "merges_file": str(out / "merges.txt")}
    tokenizer = Qwen2TokenizerFast(**files, additional_special_tokens=list(MARKS))
    tokenizer.save_pretrained(out)
    ids: dict[str, int] = tokenizer.get_vocab()
    return ids
