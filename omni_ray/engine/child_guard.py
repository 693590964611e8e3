"""Ends child processes when this process is killed: an engine's orphan would hold its GPU's memory for ever.

Linux keeps orphans alive, and a killed process cannot clean up, so a shell does: it reads pids from a pipe, and kills
them and their children when the pipe ends without a last word.
"""

import subprocess
import threading
from collections.abc import Iterable, Sequence
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from typing import Final

SCRIPT: Final = """
end() {
    for pid in $pids; do
        for found in $(grep -lx "PPid:[[:space:]]*$pid" /proc/[0-9]*/status); do
            found=${found#/proc/}
            pids="$pids ${found%/status}"
        done
    done
    kill -9 $pids
}
exec 2>/dev/null  # processes that are gone by then, which is what is wanted
while read -r word; do
    case $word in
        done) exit ;;
        kill) end ;;
        *) pids="$pids $word" ;;
    esac
done
end
"""
LOOK_EVERY_S: Final = 0.2


class ChildGuard:
    """Guards every child that ``multiprocessing`` starts between ``__enter__`` and ``__exit__``, until ``release``.

    The children are looked up by a thread while the body runs, because a start takes minutes and may be killed too.

    Attributes:
        killed: ``kill`` was called.
    """

    def __init__(self) -> None:
        self.killed = False
        self._before = set(active_children())
        self._guarded: list[BaseProcess] = []
        self._started = threading.Event()
        # of a session of its own: whoever signals our whole process group must not hit it first
        self._shell = subprocess.Popen(["/bin/sh", "-c", SCRIPT], stdin=subprocess.PIPE, start_new_session=True)
        self._thread = threading.Thread(target=self._look, name="child-guard", daemon=True)

    def __enter__(self) -> "ChildGuard":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._started.set()
        self._thread.join()
        self._add_new()

    def add(self, pids: Iterable[int]) -> None:
        """Guard these too: grandchildren, whom nobody finds once their parent is dead."""
        self._say("".join(f"{pid}\n" for pid in pids))

    def kill(self) -> None:
        """Kill all that are guarded, and their children, at once; and each that the body still starts."""
        self.killed = True
        self._say("kill\n")

    def release(self, wait_s: float) -> None:
        """The children were told to end: wait for each, at most ``wait_s``, and let the guard go."""
        for child in self._guarded:
            child.join(wait_s)
        self._say("done\n")
        assert self._shell.stdin is not None
        self._shell.stdin.close()
        self._shell.wait()

    def children(self) -> Sequence[int]:
        """Pids of those that live."""
        return [child.pid for child in self._guarded if child.is_alive() and child.pid is not None]

    def _look(self) -> None:
        while not self._started.wait(LOOK_EVERY_S):
            self._add_new()

    def _add_new(self) -> None:
        for child in active_children():
            if child not in self._before:
                self._before.add(child)
                self._guarded.append(child)
                self._say(f"{child.pid}\nkill\n" if self.killed else f"{child.pid}\n")

    def _say(self, words: str) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.write(words.encode())
        self._shell.stdin.flush()
