"""What vLLM's processes say went wrong. To their parent they only say "see above", so their errors go to a file too."""

import json
import re
import tempfile
from copy import deepcopy
from pathlib import Path
from typing import Any, Final

RECORD: Final = "\x1e"
"""Begins each record; no message holds it."""

ERROR_LINE: Final = re.compile(r"^[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt)\b")
LONGEST: Final = 1500


class ErrorLog:
    """A file that vLLM's logging writes errors to; ``close`` removes it.

    Attributes:
        config: path of a logging configuration, for ``VLLM_LOGGING_CONFIG_PATH``.
    """

    def __init__(self, logging_config: dict[str, Any]) -> None:
        """Take vLLM's own logging configuration, to which the file is added."""
        self._directory = tempfile.TemporaryDirectory(prefix="omni_ray_vllm_")
        self._errors = Path(self._directory.name) / "errors"
        self.config = Path(self._directory.name) / "logging.json"
        self._read = 0
        added = deepcopy(logging_config)
        added["formatters"]["omni_ray_errors"] = {"format": f"{RECORD}%(message)s"}
        added["handlers"]["omni_ray_errors"] = {
            "class": "logging.FileHandler",
            "formatter": "omni_ray_errors",
            "level": "ERROR",
            "filename": str(self._errors),
        }
        added["loggers"]["vllm"]["handlers"].append("omni_ray_errors")
        self.config.write_text(json.dumps(added))

    def skip(self) -> None:
        """What was said until now is no cause of what comes."""
        self._read = self._errors.stat().st_size if self._errors.is_file() else 0

    def first(self) -> str | None:
        """The first error since ``skip``, without its traceback; None if there is none."""
        if not self._errors.is_file():
            return None
        records = self._errors.read_bytes()[self._read :].decode(errors="replace").split(RECORD)[1:]
        return root_cause(records[0]) if records else None

    def close(self) -> None:
        """Remove the file."""
        self._directory.cleanup()


def root_cause(record: str) -> str:
    """The last exception of a log record's traceback, without the traceback; its first line if it has none."""
    lines = record.strip().splitlines()
    begins = [i for i, line in enumerate(lines) if ERROR_LINE.match(line)]
    return "\n".join(lines[begins[-1] :] if begins else lines[:1])[:LONGEST]
