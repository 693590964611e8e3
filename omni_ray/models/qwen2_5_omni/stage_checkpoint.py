"""The checkpoint that a stage starts from, checked the same way by all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Qwen2_5OmniConfig

from omni_ray.engine.base import EngineContext
from omni_ray.engine.omni_checkpoint import omni_checkpoint
from omni_ray.errors import ConfigError


def stage_checkpoint(
    context: EngineContext, decoder: Callable[[Any], Any] | None = None, *, speaks: bool
) -> tuple[str, Path, Any]:
    """Name and directory of a stage's checkpoint, and transformers' ``Qwen2_5OmniConfig``; see ``omni_checkpoint``.

    Raises:
        ConfigError: as there, or the decoder looks back through a window, which ours does not.
    """
    directory, config = omni_checkpoint(context, Qwen2_5OmniConfig.from_pretrained, decoder, speaks=speaks)
    if decoder is not None and set(decoder(config).layer_types) != {"full_attention"}:
        stage = context.stage.name
        raise ConfigError([f"stage {stage}: {directory} has layers of sliding attention, which are not supported"])
    assert context.model is not None
    return context.model, directory, config
