"""Whether ``any_thinker`` can serve a checkpoint that no pipeline is made for, by transformers' own tables."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Final

TABLES: Final = {
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "AutoModelForCausalLM",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": "AutoModelForImageTextToText",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES": "AutoModelForMultimodalLM",
}
"""transformers' tables of models that write text, and the auto class of each; a version may lack one."""


def serves(hf_config: Mapping[str, Any]) -> str | None:
    """Why it can: for people. None if it cannot.

    Args:
        hf_config: the checkpoint's ``config.json``.
    """
    given = hf_config.get("architectures")
    for name in given if isinstance(given, list) else ():
        if isinstance(name, str) and auto_class(name) is not None:
            return f"architecture {name}, which has no pipeline of its own and which transformers knows"
    code = hf_config.get("auto_map")
    if isinstance(code, Mapping) and "AutoModelForCausalLM" in code:
        return "its own Python code for a language model (it runs with stages.thinker.engine.trust_remote_code: true)"
    return None


def auto_class(architecture: str) -> Any:
    """The auto class of transformers for a class that writes text; None if it knows none of that name."""
    if find_spec("transformers") is None or find_spec("torch") is None:
        return None
    from transformers.models.auto import modeling_auto

    known = vars(modeling_auto)
    for table, auto in TABLES.items():
        for names in known.get(table, {}).values():
            if architecture == names or (isinstance(names, tuple | list) and architecture in names):
                return known[auto]
    return None
