"""The checkpoint that a stage starts from: found, read and checked before any tensor is, and the same way by all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Qwen3OmniMoeConfig

from omni_ray.engine.base import EngineContext
from omni_ray.engine.checkpoint_files import stage_directory
from omni_ray.engine.options import AROptions
from omni_ray.engine.vllm_options import VLLMOptions
from omni_ray.errors import ConfigError


def stage_checkpoint(
    context: EngineContext, decoder: Callable[[Any], Any] | None = None, *, speaks: bool
) -> tuple[Path, Any]:
    """The directory of a stage's checkpoint, and transformers' ``Qwen3OmniMoeConfig`` of it.

    Args:
        context: of the stage's engine.
        decoder: from that config to the part whose positions bound ``max_model_len``.
        speaks: whether the stage exists only in checkpoints with audio output.

    Raises:
        ConfigError: no model that can be had, no audio output, or ``max_model_len`` is beyond the decoder's positions.
    """
    stage, options = context.stage.name, context.options
    directory = stage_directory(context)
    config = Qwen3OmniMoeConfig.from_pretrained(directory)
    if speaks and not config.enable_audio_output:
        raise ConfigError([f"stage {stage}: {directory} has enable_audio_output: false, so it has no {stage}"])
    if decoder is not None:
        assert isinstance(options, AROptions | VLLMOptions)
        longest = decoder(config).max_position_embeddings
        if options.max_model_len > longest:
            asked = options.max_model_len
            raise ConfigError([f"stage {stage}: max_model_len: {asked} is beyond the checkpoint's {longest}"])
    return directory, config
