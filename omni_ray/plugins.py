"""Plugins: installed packages that register pipelines and models of their own, through entry points."""

import importlib.metadata
import os

PLUGIN_GROUPS = ("omni_ray.platform_plugins", "omni_ray.general_plugins")
_loaded_plugins: set[tuple[str, str]] = set()


def load_plugins() -> None:
    """Call every allowed plugin of the entry-point groups, once per process.

    ``OMNI_RAY_PLUGINS`` (comma-separated entry-point names) is an allow-list: unset allows all that are installed,
    empty allows none. A plugin that raises stops the program: a half-registered model is worse than none.
    """
    allowed = os.environ.get("OMNI_RAY_PLUGINS")
    names = None if allowed is None else {name.strip() for name in allowed.split(",") if name.strip()}
    for group in PLUGIN_GROUPS:
        for entry_point in importlib.metadata.entry_points(group=group):
            key = (group, entry_point.name)
            if key in _loaded_plugins or (names is not None and entry_point.name not in names):
                continue
            _loaded_plugins.add(key)
            try:
                entry_point.load()()
            except Exception as error:
                _loaded_plugins.discard(key)  # a second try must fail too, not go on without it
                error.add_note(f"raised by plugin {entry_point.name!r} ({entry_point.value}) of group {group!r}")
                raise
