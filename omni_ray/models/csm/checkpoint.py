"""Makes a tiny random CSM checkpoint for CPU, with a tokenizer made here; nothing is downloaded.

Its layout is that of a published one in transformers' format, so that both load with the same code. Modules and their
initialisation are transformers'.
"""

import math
from pathlib import Path
from typing import Any, Final

from omni_ray.engine.byte_tokenizer import byte_backend
from omni_ray.models.csm.prompt import AUDIO, AUDIO_END, BEGIN, END, SAMPLE_RATE

CODEBOOKS: Final = 8
CODES: Final = 32
"""Of each codebook; the talker's vocabulary has three more, as the published one."""

LOUDNESS: Final = 0.05
"""Root mean square of the sound of random codes, within a factor of 1.5."""


def make_tiny(out: Path, seed: int = 0) -> None:
    """Write a random checkpoint of some 0.3 M parameters; equal seeds give equal files.

    The end is possible but rare, so answers go on until a limit. Sound neither vanishes nor saturates.

    Args:
        out: made if need be; files of the same names are replaced.
        seed: of the weights.
    """
    import torch
    from transformers import CsmConfig, CsmForConditionalGeneration, CsmProcessor, EncodecFeatureExtractor

    from omni_ray.engine.transformers_build import BUILDING
    from omni_ray.models.csm.stage_checkpoint import initialise_codebooks

    tokenizer = _tokenizer()
    config = CsmConfig(**_config(tokenizer.get_vocab()))
    with BUILDING, torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: Any = CsmForConditionalGeneration(config).eval().float()
        initialise_codebooks(model.codec_model, seed)
        # Wide enough logits that codes differ, and no logit for ids that the codec lacks.
        model.depth_decoder.codebooks_head.weight.mul_(20)[..., CODES:] = 0
        model.lm_head.weight.mul_(20)[CODES:] = 0
        for embedding in (model.embed_text_tokens, model.backbone_model.embed_tokens.embed_audio_tokens):
            embedding.weight.mul_(20)
        for name, parameter in model.codec_model.named_parameters():
            if name.endswith("layer_scale.scale"):
                parameter.fill_(0.5)
        codes = torch.randint(CODES, (1, CODEBOOKS, 40))
        loudness = float(model.codec_model.decode(codes, return_dict=True).audio_values.square().mean().sqrt())
        last = model.codec_model.decoder.layers[-1].conv
        # A power of two: sums that depend on the number of threads must not show in the file.
        for parameter in (last.weight, last.bias):
            parameter.mul_(2.0 ** round(math.log2(LOUDNESS / loudness)))
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    CsmProcessor(EncodecFeatureExtractor(sampling_rate=SAMPLE_RATE), tokenizer).save_pretrained(out)


def _config(ids: dict[str, int]) -> dict[str, Any]:
    """The published configuration's layout, with widths divided; Mimi's strides are the published ones."""
    return {
        "num_codebooks": CODEBOOKS,
        "vocab_size": CODES + 3,
        "text_vocab_size": len(ids),
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": ids[BEGIN],
        "pad_token_id": ids[AUDIO],
        "audio_token_id": ids[AUDIO],
        "audio_eos_token_id": ids[AUDIO_END],
        "codebook_pad_token_id": CODES + 2,
        "codebook_eos_token_id": 0,
        "depth_decoder_config": {
            "num_codebooks": CODEBOOKS,
            "backbone_hidden_size": 48,
            "vocab_size": CODES + 3,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CODEBOOKS + 1,
        },
        "codec_config": {
            "model_type": "mimi",
            "sampling_rate": SAMPLE_RATE,
            "hidden_size": 32,
            "num_filters": 4,
            "codebook_size": CODES,
            "codebook_dim": 16,
            "vector_quantization_hidden_dimension": 16,
            "num_quantizers": CODEBOOKS,
            "upsample_groups": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "intermediate_size": 48,
            "sliding_window": 50,
        },
    }


def _tokenizer() -> Any:
    """A tokenizer of bytes that knows the published one's control tokens, and adds them around a text as it does."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast

    backend = byte_backend((BEGIN, END, AUDIO, AUDIO_END))
    known = [(token, backend.token_to_id(token)) for token in (BEGIN, END)]
    backend.post_processor = processors.TemplateProcessing(f"{BEGIN} $A {END}", special_tokens=known)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BEGIN, eos_token=END, pad_token=END)
