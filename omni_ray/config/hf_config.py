"""The JSON files that say what a checkpoint is."""

import json
import os
from pathlib import Path
from typing import Any

from omni_ray.errors import ConfigError


def read_hf_config(model: str, file: str = "config.json") -> dict[str, Any]:
    """A JSON file of a checkpoint directory, or of a hub id through huggingface_hub.

    Raises:
        ConfigError: naming this node and the path, because the builder may run on a node without the files.
    """
    path = Path(model) / file
    if not path.is_file() and not Path(model).exists() and model.count("/") == 1:
        from huggingface_hub import hf_hub_download

        try:
            path = Path(hf_hub_download(model, file))
        except Exception as error:  # the hub client raises many unrelated types
            raise ConfigError([f"model {model!r}: {file} cannot be fetched from the hub: {error}"]) from error
    try:
        loaded = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        node = os.uname().nodename
        raise ConfigError([f"model {model!r}: cannot read {path} on node {node!r}: {error}"]) from error
    if not isinstance(loaded, dict):
        raise ConfigError([f"model {model!r}: {path} must hold a mapping, got {type(loaded).__name__}"])
    return loaded
