"""Turns HAProxy mode on in an environment that a Ray cluster of this machine is then started in."""

import importlib
import tempfile
from collections.abc import MutableMapping
from typing import Literal

from ports import free_port

from omni_ray.serve.haproxy import ENABLED, SETTINGS

Whose = Literal["ours", "serves"]
SEPARATE_LOOP = "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"
WHOSE: tuple[Whose, ...] = ("ours", "serves")


def turn_on(environment: MutableMapping[str, str], whose: Whose) -> None:
    """As ``README.md`` says (``ours``), or with Serve's own HAProxy and retries (``serves``); files in a new folder."""
    home = tempfile.mkdtemp(prefix="haproxy")
    environment[ENABLED] = "1"
    environment["RAY_SERVE_THROUGHPUT_OPTIMIZED"] = "1"
    environment["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"] = f"{home}/haproxy.cfg"
    environment["RAY_SERVE_HAPROXY_SOCKET_PATH"] = f"{home}/admin.sock"
    environment["RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"] = f"{home}/metrics.sock"
    environment["RAY_SERVE_HAPROXY_SERVER_STATE_BASE"] = home
    environment["RAY_SERVE_HAPROXY_SERVER_STATE_FILE"] = f"{home}/server-state"
    environment["RAY_SERVE_HAPROXY_STATS_PORT"] = str(free_port())
    environment["RAY_SERVE_HAPROXY_METRICS_PORT"] = str(free_port())
    if whose == "ours":
        environment.update(SETTINGS)
    # this process calls handles without an event loop of its own; Ray's processes go by the mode
    environment[SEPARATE_LOOP] = "1"
    importlib.import_module("ray.serve")
    del environment[SEPARATE_LOOP]
