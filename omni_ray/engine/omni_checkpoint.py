"""The checkpoint of an omni model as one of its stages starts from it: found, read and checked before any tensor."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from omni_ray.engine.base import EngineContext
from omni_ray.engine.checkpoint_files import check_positions, stage_directory
from omni_ray.engine.options import AROptions
from omni_ray.engine.vllm_options import VLLMOptions
from omni_ray.errors import ConfigError


def omni_checkpoint(
    context: EngineContext, read: Callable[[Path], Any], decoder: Callable[[Any], Any] | None, *, speaks: bool
) -> tuple[Path, Any]:
    """The directory of a stage's checkpoint, and its configuration.

    Args:
        context: of the stage's engine.
        read: transformers' reader of the directory's ``config.json``.
        decoder: from that config to the part whose positions bound ``max_model_len``.
        speaks: whether the stage exists only in checkpoints with audio output.

    Raises:
        ConfigError: no model that can be had, no audio output, or ``max_model_len`` is beyond the decoder's positions.
    """
    stage, options = context.stage.name, context.options
    directory = stage_directory(context)
    config = read(directory)
    if speaks and not config.enable_audio_output:
        raise ConfigError([f"stage {stage}: {directory} has enable_audio_output: false, so it has no {stage}"])
    if decoder is not None:
        assert isinstance(options, AROptions | VLLMOptions)
        check_positions(stage, options.max_model_len, decoder(config).max_position_embeddings)
    return directory, config
