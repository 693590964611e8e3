"""A server that is started by its command, waited for, and stopped with everything it started."""

import contextlib
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx

from omni_ray.errors import ConfigError, OmniRayError

STOP_S = 90.0
KILLED_S = 15.0


class ServerFailedError(OmniRayError):
    """The server did not become healthy, or what it started does not end."""


@contextlib.contextmanager
def running(command: str, health_url: str, start_timeout_s: float, say: Callable[[str], None]) -> Iterator[float]:
    """Starts ``command`` as a process group of its own; yields the seconds until ``health_url`` answered 200.

    At the end the group gets SIGTERM, and after ``STOP_S`` SIGKILL; so do processes that left the group. Returns only
    when all are gone, so that the next server finds the machine empty.

    Raises:
        ConfigError: the command is empty or cannot be run, or something answers at ``health_url`` already.
        ServerFailedError: it ended, or was not healthy within ``start_timeout_s``; says the end of its output.
    """
    if _healthy(health_url):
        raise ConfigError([f"{health_url} answers already: another server is running there"])
    words = shlex.split(command)
    if not words:
        raise ConfigError(["the server's command is empty"])
    with tempfile.NamedTemporaryFile(prefix="omni-ray-bench-", suffix=".log") as log:
        started = time.monotonic()
        try:
            process = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise ConfigError([f"{words[0]} cannot be run: {error.strerror}"]) from error
        family = _Family(process.pid)
        try:
            while not _healthy(health_url):
                waited = time.monotonic() - started
                if process.poll() is not None:
                    raise ServerFailedError(f"{command}: ended with {process.returncode}\n{_tail(log.name)}")
                if waited > start_timeout_s:
                    raise ServerFailedError(f"{command}: not healthy within {start_timeout_s:g} s\n{_tail(log.name)}")
                family.look()
                time.sleep(0.25)
            yield time.monotonic() - started
        finally:
            family.look()
            _stop(process, family, say)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def _tail(path: str) -> str:
    return "\n".join(Path(path).read_text(errors="replace").splitlines()[-30:])


def _stop(process: subprocess.Popen[bytes], family: "_Family", say: Callable[[str], None]) -> None:
    _signal_group(process.pid, signal.SIGTERM)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        say(f"the server did not end within {STOP_S:g} s of SIGTERM; it is killed")
    deadline = time.monotonic() + KILLED_S
    if process.returncode is not None:  # it may have left some that are still on their way out
        while family.alive() and time.monotonic() < deadline - KILLED_S / 2:
            time.sleep(0.1)
    _signal_group(process.pid, signal.SIGKILL)
    for pid in family.alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(KILLED_S)
    while left := family.alive():
        if time.monotonic() > deadline:
            raise ServerFailedError(f"processes {left} of the server do not end")
        time.sleep(0.1)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, number)


class _Family:
    """A process and its descendants, known by pid and start time; some leave the process group (Ray's do)."""

    def __init__(self, root: int) -> None:
        self._root = root
        self._known: dict[int, str] = {}

    def look(self) -> None:
        """Remember every descendant alive now."""
        parents = {pid: fields for pid in _pids() if (fields := _stat(pid)) is not None}
        found = {self._root, *self._known}
        while more := {pid for pid, (parent, _, _) in parents.items() if parent in found} - found:
            found |= more
        self._known |= {pid: parents[pid][1] for pid in found if pid in parents and pid not in self._known}

    def alive(self) -> list[int]:
        """Those remembered that still run; a pid taken by another process since is not one of them."""
        now = {pid: _stat(pid) for pid in self._known}
        return [pid for pid, fields in now.items() if fields and fields[1] == self._known[pid] and fields[2] != "Z"]


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _stat(pid: int) -> tuple[int, str, str] | None:
    """Parent, start time and state of a process; None if it is gone."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return int(after_name[1]), after_name[19], after_name[0]
