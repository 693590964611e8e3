"""Ends all processes of vLLM when one of them dies. Imports no vLLM.

With tensor parallelism each rank is a process, and those that live wait for ever in the collective that a dead one does
not enter. vLLM 0.26 and 0.32 give them 9 s to leave by themselves, kill them, and only then tell their requests: over
nine seconds of silence, while another replica could already go on with the answers.
"""

import os
import threading
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Final

from omni_ray.engine.child_guard import ChildGuard

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

LAST_WORDS_S: Final = 0.5
"""In which vLLM's core says which rank died, and of what."""


class RankPid:
    """VLLM's ``worker_extension_cls``: its methods become the worker's, called by ``collective_rpc``."""

    def omni_ray_pid(self) -> int:
        """Of the rank's process."""
        return os.getpid()


class RankWatch:
    """Waits for the first death among vLLM's processes, in a thread of its own, until ``stop``."""

    @classmethod
    async def of(cls, llm: "AsyncLLM", guard: ChildGuard) -> "RankWatch":
        """Watch the core and all ranks of ``llm``; ``guard`` has to guard the core, and guards the ranks from here."""
        ranks: list[int] = await llm.collective_rpc("omni_ray_pid")
        guard.add(ranks)
        return cls([*guard.children(), *ranks], guard)

    def __init__(self, pids: Sequence[int], guard: ChildGuard) -> None:
        self._guard = guard
        self._processes = [os.pidfd_open(pid) for pid in pids]
        self._ended, self._end = os.pipe()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """The processes may end now."""
        self._stopped.set()
        os.close(self._end)
        self._thread.join()
        for descriptor in (self._ended, *self._processes):
            os.close(descriptor)

    def _watch(self) -> None:
        wait([self._ended, *self._processes])
        if not self._stopped.wait(LAST_WORDS_S):
            self._guard.kill()
