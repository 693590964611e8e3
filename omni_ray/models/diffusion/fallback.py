"""Whether ``diffusion`` can serve a checkpoint that no pipeline is made for: diffusers knows its pipeline class."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any


def serves(model_index: Mapping[str, Any]) -> str | None:
    """Why it can: for people. None if it cannot.

    Args:
        model_index: the checkpoint's ``model_index.json``.
    """
    name = model_index.get("_class_name")
    if not isinstance(name, str) or "_diffusers_version" not in model_index or find_spec("diffusers") is None:
        return None
    from omni_ray.models.diffusion.index import paints

    return f"_class_name {name}, which makes pictures of text" if paints(name) else None
