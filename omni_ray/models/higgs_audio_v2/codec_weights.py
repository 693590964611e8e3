"""Reads one half of the codec from its checkpoint."""

from pathlib import Path
from typing import Any, Final

import torch

from omni_ray.engine.base import EngineContext
from omni_ray.engine.checkpoint_files import load_parts
from omni_ray.engine.transformers_build import BUILDING
from omni_ray.models.higgs_audio_v2.codec_modules import CodecDecoder, CodecEncoder

TRAINED_ONLY: Final = ("decoder_semantic.", "fc1.", "semantic_model.masked_spec_embed")
"""Tensors that neither half computes with."""
ENCODING: Final = ("acoustic_encoder.", "encoder_semantic.", "semantic_model.", "fc.")
DECODING: Final = ("acoustic_decoder.", "fc2.")
BOOKKEEPING: Final = ("codebook.inited", "codebook.cluster_size", "codebook.embed_avg")

GAIN: Final = 0.7
"""Of random weights: small enough that the residual sums before DAC's sines stay near 1, where float32 is exact."""


def load_half(
    half: type[CodecEncoder] | type[CodecDecoder], directory: Path, config: Any, context: EngineContext
) -> Any:
    """A half in evaluation mode, float32, on the GPU if there is one; ``dummy``: with random weights.

    Raises:
        ConfigError: a tensor is missing, unexpected or of another shape.
    """
    with BUILDING:
        module: Any = half(config).eval().float()
    if context.load_format == "dummy":
        initialise(module, 0)
    else:
        unread = BOOKKEEPING if half is CodecEncoder else (*BOOKKEEPING, "project_in")
        parts = tuple(f"quantizer.quantizers.{k}.{part}" for k in range(config.num_quantizers) for part in unread)
        skip = (*TRAINED_ONLY, *(DECODING if half is CodecEncoder else ENCODING), *parts)
        load_parts(directory, module, "", context.progress, skip)
    return module.requires_grad_(False).to("cuda" if torch.cuda.is_available() else "cpu")


@torch.no_grad()
def initialise(module: CodecEncoder | CodecDecoder, seed: int) -> None:
    """Draw the weights of a half so that signals neither vanish nor grow; upstream leaves all code vectors zero.

    Args:
        module: freshly built; norms stay as they are.
        seed: of a generator per tensor, so that what both halves have in common is equal.
    """
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        generator = torch.Generator().manual_seed(seed)
        if name.endswith("codebook.embed"):
            tensor.normal_(generator=generator)
        elif name.endswith("weight") and tensor.dim() > 1:
            tensor.normal_(std=GAIN * tensor[0].numel() ** -0.5, generator=generator)
        elif name.endswith("bias"):
            tensor.zero_()
        seed += 1
