"""Python's garbage collector, out of the way while much is made that stays.

Importing vLLM makes a million objects and no garbage, and the collector looks at them again and again meanwhile: that
is a fifth of what a stage's process computes before vLLM's own process starts, and a third of what that one does before
it loads the model.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any, Final

PAUSE: Final = f"{__name__}.pause"
IMPORTED: Final = "vllm.config"
"""Imported early by every process of vLLM's, but not before 0.26 configures its logging."""

_paused = ExitStack()
"""What ``resume`` undoes."""


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect nothing in this process while the body runs. Bodies may nest, and overlap in threads."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def pause() -> None:
    """Collect nothing in this process until ``resume``; nothing where vLLM is imported already: nobody would resume."""
    if IMPORTED in sys.modules:
        return
    _paused.enter_context(uncollected())
    _paused.callback(gc.freeze)  # comes first: what was imported need never be looked at


def resume() -> None:
    """End ``pause``; nothing where it was not called."""
    _paused.close()


def pausing(logging_config: dict[str, Any]) -> dict[str, Any]:
    """A configuration for ``logging.config`` with which a process also calls ``pause``: as it makes its filters.

    vLLM 0.26's processes configure their logging before they import the rest of vLLM, and run nothing of ours before
    that. Those of 0.32 do it later, so that they gain nothing.
    """
    config = deepcopy(logging_config)
    config.setdefault("filters", {})["omni_ray_pause"] = {"()": PAUSE}  # no handler has this filter
    return config
