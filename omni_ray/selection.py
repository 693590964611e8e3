"""Which pipeline serves a checkpoint: ``omni-ray serve DIR_OR_HUB_ID`` names the weights and no pipeline."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omni_ray.config.hf_config import read_hf_config
from omni_ray.config.pipeline import PipelineConfig
from omni_ray.errors import ConfigError
from omni_ray.plugins import load_plugins
from omni_ray.registry import OMNI_PIPELINES, declared_at, import_dotted, is_pipeline


@dataclass(frozen=True, slots=True)
class Selection:
    """A pipeline, the checkpoint it was chosen for, and why.

    Attributes:
        pipeline: registry name.
        model: checkpoint directory or hub id; None if the pipeline was named itself.
        reason: what of the checkpoint decided, for people.
    """

    pipeline: str
    model: str | None = None
    reason: str = ""


def select(word: str) -> Selection:
    """The pipeline that ``word`` names, or the one for the checkpoint that it names.

    A registered name or alias wins over a directory of that name. A directory, or a word with a slash, is a
    checkpoint; anything else is taken for a pipeline's name, so that a typing error is told as one.

    Raises:
        ConfigError: as ``select_for_checkpoint``.
    """
    if is_pipeline(word) or not (Path(word).is_dir() or "/" in word):
        return Selection(word)
    return select_for_checkpoint(word)


def select_for_checkpoint(model: str) -> Selection:
    """The registered pipeline for a checkpoint: by architecture, by model type, or by the directory's name.

    An earlier rule wins: Qwen3-Omni's architecture is not overruled by a directory that somebody called otherwise.
    Where no rule finds one, pipelines with a ``fallback`` are asked whether they can serve it nevertheless.

    Args:
        model: checkpoint directory or hub id, of which ``config.json`` alone is read, or if it has none (diffusers'
            checkpoints) ``model_index.json``.

    Raises:
        ConfigError: nothing or more than one pipeline fits; the message says what was looked at.
    """
    load_plugins()
    hf_config = _read(model)
    architectures = tuple(str(name) for name in _listed(hf_config.get("architectures")))
    model_type = hf_config.get("model_type")
    basename = Path(model).name
    by_architecture, by_type, by_basename = [], [], []
    fallbacks: dict[str, str] = {}
    for name, path in sorted(OMNI_PIPELINES.items()):
        declared = declared_at(path, {})  # the default variant: a resolver need not survive another model's config
        if set(declared.hf_architectures) & set(architectures):
            by_architecture.append(name)
        if model_type in declared.hf_model_types:
            by_type.append(name)
        if _names_it(declared, basename):
            by_basename.append(name)
        if declared.fallback is not None:
            fallbacks[name] = declared.fallback
    rules = (
        (by_architecture, f"architecture {', '.join(architectures)}"),
        (by_type, f"model_type {model_type}"),
        (by_basename, f"directory name {basename}"),
    )
    fits, reason = next(((found, why) for found, why in rules if found), ([], ""))
    if not fits:
        asked = {name: import_dotted(path)(hf_config) for name, path in fallbacks.items()}
        fits = [name for name, why in asked.items() if why]
        reason = " and by ".join(asked[name] for name in fits)
    if len(fits) == 1:
        return Selection(fits[0], model, reason)
    seen = f"architectures {list(architectures)}, model_type {model_type!r}, directory name {basename!r}"
    what = f"several pipelines fit by {reason}: {', '.join(fits)}" if fits else "no pipeline fits"
    hint = f"name one: PIPELINE model={model} with PIPELINE of {', '.join(sorted(OMNI_PIPELINES))}"
    raise ConfigError([f"model {model!r} ({seen}): {what}; {hint}"])


def _read(model: str) -> dict[str, Any]:
    try:
        return read_hf_config(model)
    except ConfigError as missing:
        try:
            return read_hf_config(model, "model_index.json")
        except ConfigError:
            raise missing from None


def _names_it(declared: PipelineConfig, basename: str) -> bool:
    known = {name.casefold() for name in declared.checkpoint_basenames}
    return basename.casefold() in known


def _listed(value: Any) -> tuple[Any, ...]:
    """A checkpoint's field as a tuple; files from elsewhere hold null or a lone string where a list belongs."""
    if value is None or isinstance(value, Mapping):
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)
