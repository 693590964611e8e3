"""The checkpoint that a stage starts from: found, read and checked before any tensor is, and the same way by all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Qwen2_5OmniConfig

from omni_ray.engine.base import EngineContext
from omni_ray.engine.checkpoint_files import checkpoint_directory
from omni_ray.engine.options import AROptions
from omni_ray.errors import ConfigError


def stage_checkpoint(
    context: EngineContext, decoder: Callable[[Any], Any] | None = None, *, speaks: bool
) -> tuple[str, Path, Any]:
    """Name and directory of a stage's checkpoint, and transformers' ``Qwen2_5OmniConfig`` of it.

    Args:
        context: of the stage's engine.
        decoder: from that config to the part whose positions bound ``max_model_len``.
        speaks: whether the stage exists only in checkpoints with audio output.

    Raises:
        ConfigError: no model that can be had, no audio output, ``max_model_len`` is beyond the decoder's positions, or
            the decoder looks back through a window, which ours does not.
    """
    stage, options = context.stage.name, context.options
    if context.model is None:
        raise ConfigError([f"stage {stage} needs a model: a checkpoint directory or hub id"])
    directory = checkpoint_directory(context.model)
    config: Any = Qwen2_5OmniConfig.from_pretrained(directory)
    if speaks and not config.enable_audio_output:
        raise ConfigError([f"stage {stage}: {directory} has enable_audio_output: false, so it has no {stage}"])
    if decoder is not None:
        assert isinstance(options, AROptions)
        part = decoder(config)
        if options.max_model_len > part.max_position_embeddings:
            asked, longest = options.max_model_len, part.max_position_embeddings
            raise ConfigError([f"stage {stage}: max_model_len: {asked} is beyond the checkpoint's {longest}"])
        if set(part.layer_types) != {"full_attention"}:
            raise ConfigError([f"stage {stage}: {directory} has layers of sliding attention, which are not supported"])
    return context.model, directory, config
