"""Whole code frames as CUDA graphs, one per number of rows: launched ahead of being read.

A frame is some 600 small kernels; one by one the host could not launch them fast enough. A graph of all of them is
launched at once, for the smallest captured number of rows that holds those wanted; the others are rows of nobody. What
rows say and what becomes of them crosses in one small pinned copy each way, so the host never waits before it has
launched what comes next.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omni_ray.engine.capture import Captures, captured
from omni_ray.engine.kernels.rows import nobody

IN_FLIGHT: Final = 3
"""Pinned buffers per graph: one frame is computed, one is read, one is written."""

COMMON: Final = (1, 8)
"""Numbers of rows whose graphs are captured before the engine starts, beside the largest one."""


class FrameProgram(Protocol):
    """The kernels of a frame over a fixed number of rows. ``run`` launches them, allocates nothing, never waits."""

    rows: Tensor
    results: Tensor

    def run(self) -> None:
        """From ``rows`` [M, words] to ``results`` [M, words], both int32."""


@dataclass(slots=True)
class Flight:
    """A launched frame: ``land`` waits for it and gives its results int32 [n, words], before two more launch."""

    results: Tensor
    done: torch.cuda.Event
    count: int

    def land(self) -> NDArray[np.int32]:
        """A copy; blocking."""
        self.done.synchronize()
        return np.array(self.results.numpy()[: self.count])


class _Graph:
    """One captured program with its pinned buffers."""

    def __init__(self, program: FrameProgram, m: int) -> None:
        self.program, self.m = program, m
        self._graph = captured(program.run)  # rows of nobody leave no trace
        self._inputs = [torch.empty_like(program.rows, device="cpu").pin_memory() for _ in range(IN_FLIGHT)]
        self._outputs = [torch.empty_like(program.results, device="cpu").pin_memory() for _ in range(IN_FLIGHT)]
        self._nobody = nobody(m)
        self._next = 0

    def launch(self, table: NDArray[np.int32]) -> Flight:
        """On the current stream."""
        turn, self._next = self._next, (self._next + 1) % IN_FLIGHT
        given = self._inputs[turn].numpy()
        given[: len(table)] = table
        given[len(table) :] = self._nobody[len(table) :]
        self.program.rows.copy_(self._inputs[turn], non_blocking=True)
        self._graph.replay()
        self._outputs[turn].copy_(self.program.results, non_blocking=True)
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record()
        return Flight(self._outputs[turn], done, len(table))


class FrameGraphs:
    """Graphs for up to ``most`` rows. ``launch`` from one thread, whose stream orders frames and everything else.

    Attributes:
        sizes: numbers of rows for which there are, or will be, graphs.
    """

    def __init__(
        self, make: Callable[[int], FrameProgram], most: int, captures: Captures, only_largest: bool = False
    ) -> None:
        """Capture the common graphs, and leave the others to ``captures``.

        Args:
            make: a program for M rows; called on either thread.
            most: the largest M.
            captures: for graphs that can wait: larger ones serve their rows too, slower, not wrong.
            only_largest: have no other graph, so that a frame always has one shape.
        """
        doubling = [1 << power for power in range(most.bit_length()) if 1 << power < most]
        self.sizes = [most] if only_largest else [*doubling, most]
        self._make = make
        self._graphs: dict[int, _Graph] = {}
        for m in [m for m in self.sizes if m in (*COMMON, most)]:
            self._capture(m)
        for m in [m for m in self.sizes if m not in self._graphs]:
            captures.add(f"frames of {m} rows", partial(self._capture, m))

    def launch(self, table: NDArray[np.int32]) -> Flight:
        """Start a frame of the rows in ``table`` [n, words]; rows of one frame have different slots."""
        size = min(m for m in self.sizes if m >= len(table) and m in self._graphs)
        return self._graphs[size].launch(table)

    def program(self, m: int) -> FrameProgram:
        """The captured program for ``m`` rows."""
        return self._graphs[m].program

    def _capture(self, m: int) -> None:
        self._graphs[m] = _Graph(self._make(m), m)
