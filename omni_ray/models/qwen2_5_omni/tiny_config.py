"""The configuration of the tiny checkpoint: every part of the published one, small. Numbers only, no heavy imports.

What parity depends on is kept: grouped heads with biases, windowed and full vision layers, 480 samples a code,
diffusion blocks that look ahead and back. Codec control ids lie behind the codes, as published.
"""

from collections.abc import Callable
from typing import Any, Final

HIDDEN: Final = 32
"""Of the thinker, and so of the rows that the talker hears."""
CODES: Final = 64
TALKER_VOCABULARY: Final = CODES + 16
PAD, BOS, EOS, MASK = CODES + 4, CODES + 5, CODES + 6, CODES + 8
TEXT_CONTROL: Final = ("pad", "bos", "eos", "chelsie", "ethan")
"""Rows of the thinker's embedding table behind the tokenizer's tokens: text marks that only the talker hears."""
MEL: Final = 20
SPEAKER_WIDTH: Final = 12
STD: Final = 0.3
"""Initial standard deviation: with the usual 0.02 all logits of so small a model are nearly equal."""
ROPE: Final = {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [2, 1, 1]}


def tiny_config(token_id: Callable[[str], int], vocabulary: int) -> dict[str, Any]:
    """Keyword arguments of transformers' ``Qwen2_5OmniConfig``.

    Args:
        token_id: id of a text that is one token.
        vocabulary: tokens of the tokenizer.
    """
    placeholders = {
        "audio_token_index": token_id("<|AUDIO|>"),
        "image_token_index": token_id("<|IMAGE|>"),
        "video_token_index": token_id("<|VIDEO|>"),
        "audio_start_token_id": token_id("<|audio_bos|>"),
        "audio_end_token_id": token_id("<|audio_eos|>"),
        "vision_start_token_id": token_id("<|vision_bos|>"),
        "vision_end_token_id": token_id("<|vision_eos|>"),
        "position_id_per_seconds": 25,
        "seconds_per_chunk": 2,
        "initializer_range": STD,
    }
    thinker = {
        "text_config": _text((vocabulary + len(TEXT_CONTROL) + 63) // 64 * 64),
        "audio_config": _audio(),
        "vision_config": _vision(),
        **placeholders,
        "user_token_id": token_id("user"),
        "tie_word_embeddings": False,
    }
    return {
        "thinker_config": thinker,
        "talker_config": {**_talker(vocabulary), **placeholders},
        "token2wav_config": {"dit_config": _dit(), "bigvgan_config": _bigvgan()},
        "enable_audio_output": True,
    }


def preprocessor_config() -> dict[str, Any]:
    """``preprocessor_config.json`` of sound and images; upstream fills every clip up to ``chunk_length`` seconds."""
    return {
        "processor_class": "Qwen2_5OmniProcessor",
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "sampling_rate": 16000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 30,
        "dither": 0.0,
        "padding_value": 0.0,
        "padding_side": "right",
        "return_attention_mask": True,
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 28 * 28,
        "max_pixels": 224 * 224,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }


def _text(vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_parameters": ROPE,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "initializer_range": STD,
    }


def _audio() -> dict[str, Any]:
    return {
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "output_dim": HIDDEN,
        "num_mel_bins": 128,
        "n_window": 100,
        "initializer_range": STD,
    }


def _vision() -> dict[str, Any]:
    return {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "out_hidden_size": HIDDEN,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "window_size": 56,
        "fullatt_block_indexes": [1],
        "initializer_range": STD,
    }


def _talker(vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": TALKER_VOCABULARY,
        "embedding_size": HIDDEN,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rope_parameters": ROPE,
        "max_position_embeddings": 4096,
        "tts_text_pad_token_id": vocabulary,
        "tts_text_start_token_id": vocabulary + 1,
        "tts_text_end_token_id": vocabulary + 2,
        "tts_codec_pad_token_id": PAD,
        "tts_codec_start_token_id": BOS,
        "tts_codec_end_token_id": EOS,
        "tts_codec_mask_token_id": MASK,
        "spatial_merge_size": 2,
    }


def _dit() -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "head_dim": 8,
        "emb_dim": 16,
        "block_size": 8,
        "look_ahead_layers": [1],
        "look_backward_layers": [0, 2],
        "num_embeds": CODES + 1,
        "mel_dim": MEL,
        "enc_emb_dim": SPEAKER_WIDTH,
        "enc_dim": 8,
        "enc_channels": [16, 16, 16, 16, 48],
        "enc_attention_channels": 8,
        "enc_se_channels": 8,
        "max_position_embeddings": 4096,
    }


def _bigvgan() -> dict[str, Any]:
    return {
        "mel_dim": MEL,
        "upsample_initial_channel": 64,
        "resblock_kernel_sizes": [3],
        "resblock_dilation_sizes": [[1, 3, 5]],
        "upsample_rates": [5, 3, 2, 2, 2, 2],
        "upsample_kernel_sizes": [11, 7, 4, 4, 4, 4],
    }
