"""Makes a tiny random VoxCPM2 checkpoint for CPU by the classes of the package ``voxcpm``, which must be installed."""

import json
from pathlib import Path
from typing import Any, Final

from omni_ray.engine.byte_tokenizer import byte_backend

CONFIG: Final[dict[str, Any]] = {
    "architecture": "voxcpm2",
    "lm_config": {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": 48,
        "intermediate_size": 64,
        "max_position_embeddings": 512,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0] * 6,
            "short_factor": [1.0] * 6,
            "original_max_position_embeddings": 512,
        },
        "vocab_size": 384,
        "use_mup": False,
        "scale_emb": 1,
        "dim_model_base": 48,
        "scale_depth": 1.0,
    },
    "patch_size": 2,
    "feat_dim": 8,
    "residual_lm_num_layers": 1,
    "scalar_quantization_latent_dim": 16,
    "scalar_quantization_scale": 9,
    "encoder_config": {"hidden_dim": 48, "ffn_dim": 64, "num_heads": 4, "num_layers": 1},
    "dit_config": {"hidden_dim": 48, "ffn_dim": 64, "num_heads": 4, "num_layers": 1, "cfm_config": {}},
    "audio_vae_config": {
        "encoder_dim": 4,
        "encoder_rates": [2, 5, 8, 8],
        "latent_dim": 8,
        "decoder_dim": 64,
        "decoder_rates": [8, 6, 5, 2, 2, 2],
    },
    "max_length": 512,
    "device": "cpu",
    "dtype": "float32",
}
"""The published configuration's layout, with widths divided; the codec's rates are the published ones."""


def make_tiny(out: Path, seed: int = 0) -> None:
    """Write a random checkpoint; equal seeds give equal files. It never ends before upstream's limit for a text.

    Args:
        out: made if need be; files of the same names are replaced.
        seed: of the weights.
    """
    import torch
    from safetensors.torch import save_file

    from omni_ray.models.voxcpm2.model import built

    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(CONFIG, indent=2))
    _tokenizer().save_pretrained(out)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = built(out, "cpu")
        model.stop_head.weight.zero_()
        tensors = model.state_dict()
    codec = "audio_vae."
    parts = {
        "model.safetensors": {name: t for name, t in tensors.items() if not name.startswith(codec)},
        "audiovae.safetensors": {name.removeprefix(codec): t for name, t in tensors.items() if name.startswith(codec)},
    }
    for file, part in parts.items():
        save_file({name: t.clone().contiguous() for name, t in part.items()}, out / file, {"format": "pt"})


def _tokenizer() -> Any:
    """A tokenizer of bytes, made and written by transformers: the package loads it with ``LlamaTokenizerFast``.

    Ids 101 to 104 are the package's marks of where sound begins and ends.
    """
    from transformers import PreTrainedTokenizerFast

    control = ["<unk>", "<s>", "</s>", *(f"<|reserved_{i}|>" for i in range(3, 105))]
    backend = byte_backend(control, first=True)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
