"""The checkpoint that a stage starts from, checked the same way by all."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import Qwen3OmniMoeConfig

from omni_ray.engine.base import EngineContext
from omni_ray.engine.omni_checkpoint import omni_checkpoint


def stage_checkpoint(
    context: EngineContext, decoder: Callable[[Any], Any] | None = None, *, speaks: bool
) -> tuple[Path, Any]:
    """See ``omni_checkpoint``; the configuration is transformers' ``Qwen3OmniMoeConfig``."""
    return omni_checkpoint(context, Qwen3OmniMoeConfig.from_pretrained, decoder, speaks=speaks)
