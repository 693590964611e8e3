"""Turns HAProxy mode on in an environment that a Ray cluster of this machine is then started in."""

import importlib
import tempfile
from collections.abc import MutableMapping
from pathlib import Path
from typing import Literal

from omni_ray.serve.haproxy import MODE, SETTINGS, settings_here

Whose = Literal["ours", "serves"]
SEPARATE_LOOP = "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"
LONGEST_S = 330  # of the benchmarks' streams
WHOSE: tuple[Whose, ...] = ("ours", "serves")


def turn_on(environment: MutableMapping[str, str], whose: Whose) -> None:
    """As ``README.md`` says (``ours``), or with Serve's own HAProxy and retries (``serves``); files in a new folder."""
    environment.update(MODE)
    environment.update(settings_here(Path(tempfile.mkdtemp(prefix="omni", dir="/tmp")), LONGEST_S))
    if whose == "ours":
        environment.update(SETTINGS)
    # this process calls handles without an event loop of its own; Ray's processes go by the mode
    environment[SEPARATE_LOOP] = "1"
    importlib.import_module("ray.serve")
    del environment[SEPARATE_LOOP]
