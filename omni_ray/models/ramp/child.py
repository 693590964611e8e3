"""A process that decodes for ``ramp``'s codec: what happens to a replica whose engine has processes of its own."""

import pickle
import subprocess
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from omni_ray.errors import EngineDiedError
from omni_ray.models.ramp.oracle import decode_window


class Child:
    """Starts the process; it ends with its standard input, so also with this process."""

    def __init__(self, stage: str) -> None:
        self._stage = stage
        command = [sys.executable, "-m", "omni_ray.models.ramp.child"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.decode_window(np.zeros((1, 2), np.int64), 0)

    def decode_window(self, frames: NDArray[np.int64], deficit: int) -> NDArray[np.float32]:
        """See ``oracle.decode_window``; blocking.

        Raises:
            EngineDiedError: the process is gone.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            pickle.dump((frames, deficit), self._process.stdin)
            self._process.stdin.flush()
            samples: Any = pickle.load(self._process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            raise self._died() from None
        return np.asarray(samples, np.float32)

    def check(self) -> None:
        """Raise ``EngineDiedError`` if the process is gone."""
        if self._process.poll() is not None:
            raise self._died()

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _died(self) -> EngineDiedError:
        return EngineDiedError(f"the decoding process of stage {self._stage} died", stage=self._stage)


def _serve() -> None:
    while True:
        try:
            frames, deficit = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(decode_window(frames, deficit), sys.stdout.buffer)
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    _serve()
