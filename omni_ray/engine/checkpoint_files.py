"""Reads a stage's tensors, and only those, from a checkpoint's safetensors files; strict about every name.

transformers' ``from_pretrained`` of a part (a talker, say) reports experts that it could not map as a warning and
leaves them random. Here every parameter and persistent buffer is filled from the checkpoint, or the start fails and
names what is missing, unexpected, misshapen or only half there.

Two layouts of routed experts are read: one tensor per expert and projection, as published (and as transformers'
``save_pretrained`` writes), and already fused ones, as transformers' modules hold them.
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor, nn

from omni_ray.engine.base import EngineContext
from omni_ray.errors import ConfigError

Progress = Callable[[str], None]

HUB_FILES: Final = ("*.json", "*.safetensors", "*.txt", "*.jinja", "tokenizer.model")

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"

EXPERT: Final = re.compile(r"^(?P<experts>.*\.experts)\.(?P<index>\d+)\.(?P<part>gate_proj|up_proj|down_proj)\.weight$")
"""Published name of one expert's projection, inside a stage."""

MAX_NAMED: Final = 8
"""Tensors that one problem names; the rest is counted."""


def load_parts(model_dir: Path, module: nn.Module, prefix: str, progress: Progress, skip: tuple[str, ...] = ()) -> None:
    """Fill ``module`` with the checkpoint's tensors under ``prefix``, shard by shard.

    Peak memory beyond the module is one tensor. Values are cast to the dtype and device of their target.

    Args:
        model_dir: with ``model.safetensors``, or several shards and their index.
        module: parameters and persistent buffers are materialised (values do not matter).
        prefix: what the checkpoint puts before the module's own names: ``talker.``, say; empty for nothing.
        progress: called with one line per shard.
        skip: beginnings of full names of tensors that other stages read.

    Raises:
        ConfigError: a tensor is missing, unexpected, or of another shape, or a routed expert is incomplete.
    """
    targets = {**dict(module.named_parameters(remove_duplicate=False)), **_persistent_buffers(module)}
    filling = _Filling(targets, prefix)
    shards = _shards(model_dir, prefix)
    if not shards:
        raise ConfigError([f"{model_dir}: no tensor begins with {prefix!r}"])
    for number, (shard, found) in enumerate(shards.items(), start=1):
        names = [name for name in found if not name.startswith(skip)]
        what = prefix.rstrip(".") or type(module).__name__
        progress(f"{what}: reading {shard.name}, {len(names)} tensors ({number}/{len(shards)})")
        with safe_open(shard, framework="pt") as file:
            for name in names:
                filling.put(name, file.get_tensor(name))
    if problems := filling.problems():
        raise ConfigError([f"{model_dir}: {problem}" for problem in problems])


def has_tensor(model_dir: Path, name: str) -> bool:
    """Whether the checkpoint holds a tensor of this full name."""
    return any(name in names for names in _shards(model_dir, name).values())


def read_tensor(model_dir: Path, name: str) -> Tensor:
    """One tensor of the checkpoint by its full name, on CPU, in the checkpoint's dtype.

    Raises:
        ConfigError: the checkpoint does not have it.
    """
    for shard, names in _shards(model_dir, name).items():
        if name in names:
            with safe_open(shard, framework="pt") as file:
                tensor: Tensor = file.get_tensor(name)
                return tensor
    raise ConfigError([f"{model_dir}: tensor {name!r} is missing"])


def stage_directory(context: EngineContext) -> Path:
    """The local directory of the checkpoint that a stage starts from; see ``checkpoint_directory``.

    Raises:
        ConfigError: the stage was given no model, or none that can be had.
    """
    if context.model is None:
        raise ConfigError([f"stage {context.stage.name} needs a model: a checkpoint directory or hub id"])
    return checkpoint_directory(context.model)


def check_positions(stage: str, asked: int, longest: int) -> None:
    """``ConfigError`` if a stage's ``max_model_len`` is beyond the positions of its checkpoint."""
    if asked > longest:
        raise ConfigError([f"stage {stage}: max_model_len: {asked} is beyond the checkpoint's {longest}"])


def checkpoint_directory(model: str) -> Path:
    """The local directory of a checkpoint: ``model`` itself, or the snapshot of a hub id (downloaded if need be).

    Raises:
        ConfigError: neither a directory nor a hub id that can be had.
    """
    directory = Path(model).expanduser()
    if directory.is_dir():
        return directory
    if directory.is_absolute() or model.count("/") != 1:
        raise ConfigError([f"model: {model!r} is no directory on this node, and no hub id (owner/name)"])
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # its errors have no common base: offline, gated, not found, no space
        raise ConfigError([f"model: {model!r} is no directory, and the hub does not give it: {error}"]) from error


class _Filling:
    """Takes tensors by checkpoint name, copies them where they belong, and knows what is still missing."""

    def __init__(self, targets: dict[str, Tensor], prefix: str) -> None:
        self._targets = targets
        self._prefix = prefix
        self._filled: set[int] = set()  # `id` of targets: tied parameters have two names
        self._experts: defaultdict[str, set[tuple[str, int]]] = defaultdict(set)
        self._unexpected: list[str] = []
        self._misshapen: list[str] = []

    @torch.no_grad()
    def put(self, full_name: str, tensor: Tensor) -> None:
        name = full_name.removeprefix(self._prefix)
        if match := EXPERT.match(name):
            self._put_expert(full_name, match, tensor)
            return
        target = self._targets.get(name)
        if target is None:
            self._unexpected.append(full_name)
        elif target.shape != tensor.shape:
            self._misshapen.append(f"{full_name} is {list(tensor.shape)}, not {list(target.shape)}")
        else:
            target.copy_(tensor)
            self._filled.add(id(target))

    def _put_expert(self, full_name: str, match: re.Match[str], tensor: Tensor) -> None:
        """Copy one expert's projection into its place in the fused parameter; gate rows come before up rows."""
        part, index = match["part"], int(match["index"])
        fused = f"{match['experts']}.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"
        target = self._targets.get(fused)
        if target is None or index >= len(target):
            self._unexpected.append(full_name)
            return
        place = target[index]
        if part != "down_proj":
            gate, up = place.chunk(2)
            place = gate if part == "gate_proj" else up
        if place.shape != tensor.shape:
            self._misshapen.append(f"{full_name} is {list(tensor.shape)}, not {list(place.shape)}")
            return
        place.copy_(tensor)
        seen = self._experts[fused]
        seen.add((part, index))
        if len(seen) == len(target) * (1 if part == "down_proj" else 2):
            self._filled.add(id(target))

    def problems(self) -> list[str]:
        missing = list(self._missing())
        found = {
            "tensors are missing": missing,
            "tensors are unexpected": self._unexpected,
            "tensors have another shape": self._misshapen,
        }
        return [f"{len(names)} {what}: {_named(names)}" for what, names in found.items() if names]

    def _missing(self) -> Iterator[str]:
        for name, target in self._targets.items():
            if id(target) in self._filled:
                continue
            if name not in self._experts:
                yield self._prefix + name
                continue
            experts, _, fused = name.rpartition(".")
            for part in ("down_proj",) if fused == "down_proj" else ("gate_proj", "up_proj"):
                for index in range(len(target)):
                    if (part, index) not in self._experts[name]:
                        yield f"{self._prefix}{experts}.{index}.{part}.weight"


def _named(names: list[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def _persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that a checkpoint holds; the others (rotary tables) are computed when the module is built."""
    kept = module.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in module.named_buffers(remove_duplicate=False) if name in kept}


def _shards(model_dir: Path, prefix: str) -> dict[Path, list[str]]:
    """Files that hold tensors under ``prefix``, and their names; only the headers are read."""
    shards: defaultdict[Path, list[str]] = defaultdict(list)
    index = model_dir / INDEX
    if index.is_file():
        placed: dict[str, Any] = json.loads(index.read_text())["weight_map"]
        for name, file_name in placed.items():
            if name.startswith(prefix):
                shards[model_dir / file_name].append(name)
        absent = sorted(str(path) for path in shards if not path.is_file())
        if absent:
            raise ConfigError([f"{model_dir}: shards are missing: {_named(absent)}"])
    elif (single := model_dir / SINGLE).is_file():
        with safe_open(single, framework="pt") as file:
            shards[single] = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118 not a mapping
    else:
        raise ConfigError([f"{model_dir}: neither {INDEX} nor {SINGLE} is there (load_format: dummy needs none)"])
    return {path: sorted(names) for path, names in sorted(shards.items()) if names}
