"""Builds modules of transformers; the one module that knows how 5.17, 5.19 and 5.24 differ. Knows no model.

We call few of transformers' methods. For Qwen3-Omni our containers hold its towers and small blocks under the
checkpoint's own names, so the move of the thinker's parts under ``thinker.model`` (after 5.19) does not reach us;
caches are ours, so neither does ``past_key_values`` becoming ``cache``; rope positions are ours, so ``rope_deltas`` is
never read.
What is left: ``no_init_weights`` is no documented name, and has moved between modules before 5.
"""

import threading
from typing import Any, Final, Literal, TypeVar

import torch
from torch import nn
from transformers.initialization import no_init_weights

M = TypeVar("M", bound=nn.Module)

BUILDING: Final = threading.RLock()
"""Held while a module is built: ``no_init_weights`` replaces functions of torch and transformers for all threads, and
two of them at once would leave them replaced for ever."""


def build(
    cls: type[M],
    config: Any,
    dtype: torch.dtype,
    *,
    initialise: bool,
    experts: Literal["eager", "batched_mm", "grouped_mm"] | None = None,
) -> M:
    """A module of transformers as ``from_pretrained`` would make it, in evaluation mode, before any weights.

    Args:
        cls: a ``PreTrainedModel``.
        config: its own part of the checkpoint's configuration; its ``dtype`` is set.
        dtype: of parameters. Rotary tables stay float32.
        initialise: draw random weights as upstream does, from torch's global generator; else leave them undefined.
        experts: how routed experts are computed; None takes transformers' default.
    """
    made: Any = cls
    options = {"dtype": dtype} if experts is None else {"dtype": dtype, "experts_implementation": experts}
    with BUILDING:
        if initialise:
            module: M = made._from_config(config, **options)
        else:
            with no_init_weights():
                module = made._from_config(config, **options)
    return module.eval()
