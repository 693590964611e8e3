"""The checkpoint that a stage of ``csm`` starts from: found, read and checked before any tensor is."""

from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import CsmConfig
from transformers.models.mimi import modeling_mimi

from omni_ray.engine.base import EngineContext
from omni_ray.engine.checkpoint_files import stage_directory
from omni_ray.errors import ConfigError
from omni_ray.models.csm.prompt import SAMPLE_RATE

CODEC: Final = "codec_model."
"""Where Mimi's tensors are in a checkpoint."""

MOVED: Final = "MimiDecoderModel"
"""A class of transformers 5.24, which has Mimi's modules under other names, and splits them in two models."""

ENCODING: Final = ("encoder", "encoder_transformer", "downsample")
DECODING: Final = ("decoder", "decoder_transformer", "upsample")
"""Mimi's parts that only the talker, and only code2wav, computes."""


def stage_checkpoint(context: EngineContext) -> tuple[Path, Any]:
    """The directory of a stage's checkpoint, and transformers' ``CsmConfig`` of it.

    Raises:
        ConfigError: no model that can be had, one whose codec does not fit its talker or streams in another way, or a
            transformers whose Mimi is built otherwise.
    """
    if MOVED in vars(modeling_mimi):
        raise ConfigError([f"stage {context.stage.name}: needs transformers 5.17 to 5.19; Mimi's parts moved later"])
    directory = stage_directory(context)
    config: Any = CsmConfig.from_pretrained(directory)
    codec, depth = config.codec_config, config.depth_decoder_config
    wanted = {
        "codec_config.sampling_rate": (codec.sampling_rate, SAMPLE_RATE),
        "codec_config.num_quantizers": (codec.num_quantizers, config.num_codebooks),
        "codec_config.use_causal_conv": (codec.use_causal_conv, True),
        "codec_config.pad_mode": (codec.pad_mode, "constant"),
        "codec_config.trim_right_ratio": (codec.trim_right_ratio, 1.0),
        "codec_config.audio_channels": (codec.audio_channels, 1),
        "depth_decoder_config.num_codebooks": (depth.num_codebooks, config.num_codebooks),
        "depth_decoder_config.vocab_size": (depth.vocab_size, config.vocab_size),
        "depth_decoder_config.backbone_hidden_size": (depth.backbone_hidden_size, config.hidden_size),
    }
    problems = [f"{directory}: {key} is {is_}, not {must}" for key, (is_, must) in wanted.items() if is_ != must]
    if codec.codebook_size > config.vocab_size:
        problems.append(f"{directory}: codec_config.codebook_size {codec.codebook_size} exceeds {config.vocab_size}")
    if problems:
        raise ConfigError(problems)
    return directory, config


@torch.no_grad()
def initialise_codebooks(codec: nn.Module, seed: int = 0) -> None:
    """Draw Mimi's code vectors from a normal distribution: upstream's random init leaves them all zero, thus silent.

    Args:
        codec: a freshly built ``MimiModel``.
        seed: of a generator per codebook.
    """
    for number, (name, buffer) in enumerate(codec.named_buffers()):
        if name.endswith(".codebook.embed_sum"):
            generator = torch.Generator(buffer.device).manual_seed(seed * 1_000_003 + number)
            buffer.normal_(generator=generator)
