"""The configuration of the tiny checkpoint: every part of the published one, small. Numbers only, no heavy imports.

What parity depends on is kept: deepstack, routed experts with a shared one, several codebooks, real upsampling (1920
samples per frame). Code ids lie below the talker's last 1024 ids, which upstream suppresses, and control ids inside.
"""

from collections.abc import Callable
from typing import Any, Final

THINKER_HIDDEN: Final = 32
CODES: Final = 96
RESIDUAL_CODES: Final = 64
SUPPRESSED: Final = 1024
CODEBOOKS: Final = 4
STD: Final = 0.3
"""Initial standard deviation: with the usual 0.02 all logits of so small a model are nearly equal."""

ATTENTION: Final = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
THINKER_ATTENTION: Final = {**ATTENTION, "head_dim": 32}
"""vLLM's kernels for CPUs take no smaller heads."""
MROPE: Final = {
    "rope_type": "default",
    "rope_theta": 1_000_000.0,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
    "interleaved": True,
}
THINKER_MROPE: Final = {**MROPE, "mrope_section": [8, 4, 4]}
EXPERTS: Final = {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "norm_topk_prob": True}
"""The published checkpoint normalises both routers; transformers' class default for the talker does not."""


def tiny_config(token_id: Callable[[str], int], vocabulary: int) -> dict[str, Any]:
    """Keyword arguments of transformers' ``Qwen3OmniMoeConfig``.

    Args:
        token_id: id of a text that is one token.
        vocabulary: tokens of the tokenizer.
    """
    placeholders = {
        "audio_token_id": token_id("<|audio_pad|>"),
        "image_token_id": token_id("<|image_pad|>"),
        "video_token_id": token_id("<|video_pad|>"),
        "audio_start_token_id": token_id("<|audio_start|>"),
        "vision_start_token_id": token_id("<|vision_start|>"),
    }
    thinker = {
        "text_config": _thinker_text((vocabulary + 63) // 64 * 64),
        "audio_config": _audio(),
        "vision_config": _vision(),
        **placeholders,
        "audio_end_token_id": token_id("<|audio_end|>"),
        "vision_end_token_id": token_id("<|vision_end|>"),
        "user_token_id": token_id("user"),
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
        "initializer_range": STD,
    }
    return {
        "thinker_config": thinker,
        "talker_config": {**_talker(), **placeholders},
        "code2wav_config": _code2wav(),
        "enable_audio_output": True,
        "im_start_token_id": token_id("<|im_start|>"),
        "im_end_token_id": token_id("<|im_end|>"),
        "tts_pad_token_id": token_id("<tts_pad>"),
        "tts_bos_token_id": token_id("<tts_text_bos>"),
        "tts_eos_token_id": token_id("<tts_text_eod>"),
        "system_token_id": token_id("system"),
        "user_token_id": token_id("user"),
        "assistant_token_id": token_id("assistant"),
        "initializer_range": STD,
    }


def preprocessor_config(min_pixels: int, max_pixels: int) -> dict[str, Any]:
    """``preprocessor_config.json`` of sound and images, as published: one file, read by both processors.

    Args:
        min_pixels: size below which images are enlarged.
        max_pixels: size above which they are shrunk.
    """
    return {
        "processor_class": "Qwen3OmniMoeProcessor",
        "feature_extractor_type": "WhisperFeatureExtractor",
        "feature_size": 128,
        "sampling_rate": 16000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 300,
        "dither": 0.0,
        "padding_value": 0.0,
        "padding_side": "right",
        "return_attention_mask": True,
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": min_pixels,
        "max_pixels": max_pixels,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }


def _thinker_text(vocabulary: int) -> dict[str, Any]:
    return {
        "vocab_size": vocabulary,
        "hidden_size": THINKER_HIDDEN,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        **THINKER_ATTENTION,
        **EXPERTS,
        "num_experts": 4,
        "rope_parameters": THINKER_MROPE,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,  # vLLM reads it, and transformers' class has no such field
        "initializer_range": STD,
    }


def _audio() -> dict[str, Any]:
    return {
        "d_model": 32,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "output_dim": THINKER_HIDDEN,
        "num_mel_bins": 128,
        "downsample_hidden_size": 8,
        "n_window": 50,
        "n_window_infer": 800,
        "initializer_range": STD,
    }


def _vision() -> dict[str, Any]:
    return {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 4,
        "out_hidden_size": THINKER_HIDDEN,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0, 1],
        "initializer_range": STD,
        # vLLM reads these, and transformers' class has no such fields.
        "image_size": 128,
        "apply_vit_abs_pos_embed": True,
        "tokens_per_second": 2,
    }


def _talker() -> dict[str, Any]:
    control = CODES  # the first suppressed id
    text = {
        "vocab_size": CODES + SUPPRESSED,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 3,
        **ATTENTION,
        **EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 16,
        "rope_parameters": MROPE,
        "max_position_embeddings": 4096,
        "initializer_range": STD,
    }
    predictor = {
        "vocab_size": RESIDUAL_CODES,
        "hidden_size": 24,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        **ATTENTION,
        "num_code_groups": CODEBOOKS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "initializer_range": STD,
    }
    return {
        "text_config": text,
        "code_predictor_config": predictor,
        "num_code_groups": CODEBOOKS,
        "thinker_hidden_size": THINKER_HIDDEN,
        "accept_hidden_layer": 2,
        "codec_pad_id": control + 100,
        "codec_bos_id": control + 101,
        "codec_eos_token_id": control + 102,
        "codec_nothink_id": control + 107,
        "codec_think_bos_id": control + 108,
        "codec_think_eos_id": control + 109,
        "speaker_id": {"ethan": control + 200, "chelsie": control + 201},
        "position_id_per_seconds": 13,
        "seconds_per_chunk": 2,
        "spatial_merge_size": 2,  # transformers reads it, and its class has no such field
        "initializer_range": STD,
    }


def _code2wav() -> dict[str, Any]:
    return {
        "codebook_size": CODES,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "sliding_window": 8,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_quantizers": CODEBOOKS,
        "decoder_dim": 32,
        "upsample_rates": (8, 5, 4, 3),
        "upsampling_ratios": (2, 2),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "initializer_range": 0.2,
    }
