"""``model_index.json``: which class of diffusers a checkpoint is for, and whether that class makes pictures of text.

The file is a stranger's: it may only name what diffusers and transformers themselves export. Code inside a checkpoint
(diffusers' ``custom_pipeline`` and components with Python files) is never run.
"""

import importlib
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import diffusers

from omni_ray.errors import ConfigError

INDEX: Final = "model_index.json"
_LIBRARIES: Final = ("diffusers", "transformers")
_NEEDED: Final = ("prompt", "num_inference_steps", "generator", "output_type", "callback_on_step_end")


@dataclass(frozen=True, slots=True)
class Index:
    """What a checkpoint says of itself, checked.

    Attributes:
        pipeline: class of diffusers.
        takes: names of the arguments that a call of it takes.
        components: library and class of each part; absent ones are left out.
        absent: parts that the checkpoint leaves out on purpose.
    """

    pipeline: type[diffusers.DiffusionPipeline]
    takes: frozenset[str]
    components: Mapping[str, tuple[str, str]]
    absent: tuple[str, ...]


def read_index(directory: Path) -> Index:
    """The index of a checkpoint directory.

    Raises:
        ConfigError: it cannot be read, or names what is not allowed here or makes no pictures of text alone.
    """
    path = directory / INDEX
    try:
        said = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError([f"{path} cannot be read: {error}"]) from error
    if not isinstance(said, dict):
        raise ConfigError([f"{path} must hold a mapping"])
    parts = {name: part for name, part in said.items() if not name.startswith("_") and isinstance(part, list)}
    components = {name: (str(part[0]), str(part[1])) for name, part in parts.items() if len(part) == 2 and part[0]}
    absent = tuple(name for name, part in parts.items() if part == [None, None])
    problems = [
        f"{path}: {name} is {part!r}, no class of {' or '.join(_LIBRARIES)}; a checkpoint's own code is not run"
        for name, part in parts.items()
        if name not in absent and (name not in components or component_class(*components[name]) is None)
    ]
    problems += [f"{path}: {name} must not be a string" for name, part in said.items() if _is_odd(name, part)]
    pipeline = _pipeline(path, said.get("_class_name"))
    problems += [f"{path}: {pipeline.__name__} {reason}" for reason in _unfit(pipeline)]
    if problems:
        raise ConfigError(problems)
    return Index(pipeline, _takes(pipeline), components, absent)


def paints(name: str) -> bool:
    """Whether diffusers has a pipeline class of this name that makes pictures of text alone."""
    try:
        return not _unfit(_pipeline(Path(INDEX), name))
    except ConfigError:
        return False


def _takes(pipeline: type[diffusers.DiffusionPipeline]) -> frozenset[str]:
    return frozenset(inspect.signature(pipeline.__call__).parameters) - {"self"}


def _is_odd(name: str, part: Any) -> bool:
    """Whether it is neither a part nor a setting of the pipeline."""
    return isinstance(part, str | dict) and not name.startswith("_")


def component_class(library: str, name: str) -> type[Any] | None:
    """The class of a part: from diffusers, a module of its pipelines, or transformers; None if it is of none."""
    if library in _LIBRARIES:
        return _exported(library, name)
    return _exported(f"diffusers.pipelines.{library}", name) if library in dir(diffusers.pipelines) else None


def _exported(module: str, name: str) -> type[Any] | None:
    library = importlib.import_module(module)
    found = getattr(library, name) if name in dir(library) else None
    return found if isinstance(found, type) else None


def _pipeline(path: Path, name: Any) -> type[diffusers.DiffusionPipeline]:
    found = _exported("diffusers", name) if isinstance(name, str) else None
    base = diffusers.DiffusionPipeline
    if found is None or not issubclass(found, base) or found is base:
        raise ConfigError(
            [f"{path}: _class_name {name!r} is no pipeline of diffusers {diffusers.__version__}, or lacks a package"]
        )
    return found


def _unfit(pipeline: type[diffusers.DiffusionPipeline]) -> list[str]:
    """Why a pipeline class cannot be served here."""
    takes = _takes(pipeline)
    reasons = [f"takes no {name}" for name in _NEEDED if name not in takes]
    if "num_frames" in takes or "audio_end_in_s" in takes or "audio_length_in_s" in takes:
        reasons.append("makes no pictures")
    parameters = inspect.signature(pipeline.__call__).parameters.values()
    more = [p.name for p in parameters if p.name not in ("self", "prompt") and p.default is inspect.Parameter.empty]
    named = [name for name in more if name not in ("args", "kwargs")]
    if named:
        reasons.append(f"needs more than a text: {', '.join(named)}")
    elif "image" in takes and "height" not in takes:
        reasons.append("needs a picture")
    if pipeline._load_connected_pipes:
        reasons.append("loads a second checkpoint, which its README names")
    return reasons
