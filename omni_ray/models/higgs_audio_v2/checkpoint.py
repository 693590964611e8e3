"""Makes a tiny random Higgs Audio v2 checkpoint for CPU, with a tokenizer made here; nothing is downloaded.

Its files are those of the two published ones in transformers' format, the codec's in a directory inside the talker's.
"""

import json
import math
from pathlib import Path
from typing import Any, Final

from omni_ray.engine.byte_tokenizer import byte_backend
from omni_ray.models.higgs_audio_v2.prompt import AUDIO_BEGIN, AUDIO_END, SAMPLE_RATE, TURN_END

CODEBOOKS: Final = 8
CODES: Final = 32
"""Of each codebook; the talker has two ids more, begin and end, as the published one."""
CODEC: Final = "audio_tokenizer"
BEGIN: Final = "<|begin_of_text|>"
AUDIO: Final = "<|AUDIO_OUT|>"
DELAY: Final = "<|reserved_special_token_6|>"
CONTROL: Final = (
    BEGIN, "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", TURN_END, AUDIO_BEGIN, AUDIO, AUDIO_END,
    DELAY, "<|scene_desc_start|>", "<|scene_desc_end|>",
)  # fmt: skip
LOUDNESS: Final = 0.2
"""Root mean square of the sound of random codes, within a factor of 1.5."""


def make_tiny(out: Path, seed: int = 0) -> None:
    """Write a random checkpoint of some 1 M parameters; equal seeds give equal files.

    The end is possible but rare, so answers go on until a limit. Sound neither vanishes nor saturates.

    Args:
        out: made if need be; files of the same names are replaced.
        seed: of the weights.
    """
    import torch
    from transformers import HiggsAudioV2Config, HiggsAudioV2ForConditionalGeneration

    from omni_ray.engine.transformers_build import BUILDING

    tokenizer = _tokenizer()
    config = HiggsAudioV2Config(**_config(tokenizer.get_vocab()))
    with BUILDING, torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: Any = HiggsAudioV2ForConditionalGeneration(config).eval().float()
        # Wide enough logits that codes differ, and an end that no greedy answer comes to.
        head = model.audio_lm_head.weight.mul_(4).view(CODEBOOKS, CODES + 2, -1)
        head[:, config.audio_stream_eos_id] = 0
        model.generation_config.eos_token_id = config.eos_token_id
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    named = {"audio_tokenizer_class": "HiggsAudioV2TokenizerModel", "audio_tokenizer_name_or_path": CODEC}
    processor = {"audio_tokenizer": named, "processor_class": "HiggsAudioV2Processor"}
    (out / "processor_config.json").write_text(json.dumps(processor, indent=2))
    _make_codec(out / CODEC, seed)


def _make_codec(out: Path, seed: int) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import HiggsAudioV2TokenizerConfig

    from omni_ray.engine.transformers_build import BUILDING
    from omni_ray.models.higgs_audio_v2.codec_modules import CodecDecoder, CodecEncoder
    from omni_ray.models.higgs_audio_v2.codec_weights import initialise

    config: Any = HiggsAudioV2TokenizerConfig(**_codec_config())
    with BUILDING, torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)  # of what `initialise` leaves as upstream draws it
        encoder, decoder = CodecEncoder(config).eval(), CodecDecoder(config).eval()
        initialise(encoder, seed)
        initialise(decoder, seed + 1_000_003)
        shared = encoder.quantizer.state_dict()
        decoder.quantizer.load_state_dict({name: shared[name] for name in decoder.quantizer.state_dict()})
        codes = torch.randint(CODES, (1, 40, CODEBOOKS), generator=torch.Generator().manual_seed(seed))
        last = decoder.acoustic_decoder.conv2
        # A power of two: sums that depend on the number of threads must not show in the file.
        louder = 2.0 ** round(math.log2(LOUDNESS / float(decoder(codes).square().mean().sqrt())))
        last.weight.mul_(louder)
        tensors = {**decoder.state_dict(), **encoder.state_dict()}
        for k in range(CODEBOOKS):
            book = f"quantizer.quantizers.{k}.codebook"
            tensors[f"{book}.embed_avg"] = tensors[f"{book}.embed"].clone()
            tensors[f"{book}.cluster_size"], tensors[f"{book}.inited"] = torch.ones(CODES), torch.ones(1)
    out.mkdir(parents=True, exist_ok=True)
    config.architectures = ["HiggsAudioV2TokenizerModel"]
    config.save_pretrained(out)
    save_file({name: t.contiguous() for name, t in tensors.items()}, out / "model.safetensors", {"format": "pt"})


def _config(ids: dict[str, int]) -> dict[str, Any]:
    """The published configuration's layout, with widths divided."""
    return {
        "vocab_size": len(ids),
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "initializer_range": 0.15,
        "max_position_embeddings": 2048,
        "bos_token_id": ids[BEGIN],
        "eos_token_id": ids[TURN_END],
        "pad_token_id": ids["<|end_of_text|>"],
        "num_codebooks": CODEBOOKS,
        "codebook_size": CODES + 2,
        "audio_token_id": ids[AUDIO],
        "audio_bos_token_id": ids[AUDIO_BEGIN],
        "audio_delay_token_id": ids[DELAY],
        "audio_stream_bos_id": CODES,
        "audio_stream_eos_id": CODES + 1,
    }


def _codec_config() -> dict[str, Any]:
    """As published: 960 samples a frame, 25 frames a second."""
    ratios = [8, 5, 4, 2, 3]
    return {
        "target_bandwidths": [1],
        "sample_rate": SAMPLE_RATE,
        "codebook_size": CODES,
        "codebook_dim": 8,
        "acoustic_model_config": {
            "encoder_hidden_size": 4,
            "decoder_hidden_size": 64,
            "hidden_size": 16,
            "downsampling_ratios": ratios,
            "upsampling_ratios": ratios,
        },
        "semantic_model_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 48,
            "conv_dim": [16] * 7,
            "num_conv_pos_embeddings": 16,
            "num_conv_pos_embedding_groups": 4,
        },
    }


def _tokenizer() -> Any:
    """A tokenizer of bytes that knows the published one's control tokens."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=byte_backend(CONTROL), bos_token=BEGIN, eos_token=TURN_END, pad_token="<|end_of_text|>"
    )
