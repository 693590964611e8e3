"""What a checkpoint's config says to ``any_thinker``: what of transformers computes it, and how far it reaches."""

from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from omni_ray.errors import ConfigError
from omni_ray.models.any_thinker.fallback import auto_class


def read_config(directory: Path, trust_remote_code: bool) -> Any:
    """The config as transformers reads it.

    Raises:
        ConfigError: it cannot; with transformers' own message.
    """
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        why = f"{directory}: transformers cannot read its config: {error}"
        raise ConfigError([why, *_trusted(trust_remote_code)]) from error


def max_positions(config: Any) -> int | None:
    """How many positions the text model has; None for one that needs none."""
    try:
        return int(config.get_text_config(decoder=True).max_position_embeddings)
    except AttributeError:
        return None


def class_of(directory: Path, config: Any, trust: bool) -> Any:
    """What finds the class that computes the checkpoint: in transformers, or in the checkpoint if it is trusted."""
    if trust and "AutoModelForCausalLM" in (config.to_dict().get("auto_map") or {}):
        return AutoModelForCausalLM
    name = (config.architectures or [""])[0]
    if config.is_encoder_decoder:
        raise ConfigError([f"{directory}: {name} is an encoder and a decoder; any_thinker serves decoders alone"])
    if (found := auto_class(name)) is None:
        raise ConfigError([f"{directory}: transformers has no model {name!r} that writes text", *_trusted(trust)])
    return found


def _trusted(trust: bool) -> list[str]:
    """What may help."""
    hint = "if it brings its own Python code and you trust it, set stages.thinker.engine.trust_remote_code: true"
    return [] if trust else [hint]
