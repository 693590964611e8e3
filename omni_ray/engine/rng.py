"""A request's own state of every global random generator, for upstream code that draws from them.

Our own engines take their noise from ``omni_ray.engine.noise``; a wrapped upstream generator cannot be told to.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class _State:
    python: Any
    numpy: Any
    cpu: torch.Tensor
    cuda: list[torch.Tensor]


def _read() -> _State:
    started: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    cuda = torch.cuda.get_rng_state_all() if started else []
    return _State(random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)


def _write(state: _State) -> None:
    random.setstate(state.python)
    np.random.set_state(state.numpy)
    torch.set_rng_state(state.cpu)
    if state.cuda:
        torch.cuda.set_rng_state_all(state.cuda)


class RequestRandomness:
    """What ``random``, numpy and torch (CPU and CUDA) hold for one request, from ``seed`` on."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._mine: _State | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """The process's generators hold this request's state while the body runs, and their own again afterwards.

        The caller makes sure that only one body runs at a time.
        """
        others = _read()
        try:
            if self._mine is None:
                random.seed(self._seed)
                np.random.seed(self._seed % 2**32)
                torch.manual_seed(self._seed % 2**63)
            else:
                _write(self._mine)
            yield
            self._mine = _read()
        finally:
            _write(others)
