"""Chunk schedules: cuts a stream of code frames or latent rows into the sizes that a codec is to decode at once."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from omni_ray.engine.types import CodeFrameChunk, LatentChunk
from omni_ray.errors import StageFailedError

Units: TypeAlias = LatentChunk | CodeFrameChunk
"""What a codec decodes."""


class Rechunker:
    """Cuts one request's units into chunks. None never spans the end of a latent's segment, so the last chunk of a
    segment may be smaller.
    """

    def __init__(self, size: Callable[[int, int], int] | None) -> None:
        """Begin a request.

        Args:
            size: the size of the next chunk after so many chunks, with so much of it in hand; asked whenever units
                come. If that is more already, the chunk ends with the next unit. None: chunks end with segments alone.
        """
        self._size = size
        self._made = 0
        self._held: list[NDArray[Any]] = []
        self._start = self._end = 0  # absolute positions of what is held
        self._before: Units | None = None

    def push(self, unit: Units) -> Iterator[Units]:
        """The chunks that ``unit`` completes.

        Raises:
            StageFailedError: ``unit`` does not follow the one before it.
        """
        self._check(unit)
        array = array_of(unit)
        while len(array):
            room = len(array)
            if self._size is not None:
                held = self._end - self._start
                room = max(1, self._size(self._made, held) - held)
            self._hold(array[:room])
            full = self._size is not None and len(array) >= room
            array = array[room:]
            if full and (len(array) or not _ends_segment(unit)):
                yield self._take(unit, ends=False)
        if _ends_segment(unit):
            yield self._take(unit, ends=True)

    def flush(self) -> Units | None:
        """What is left at the normal end, possibly an empty chunk; None if nothing ever came."""
        return None if self._before is None else self._take(self._before, ends=not _ends_segment(self._before))

    def _check(self, unit: Units) -> None:
        before, self._before = self._before, unit
        if before is None:
            self._start = self._end = unit.position
        elif unit.position != self._end:
            raise StageFailedError(f"input at position {unit.position} instead of {self._end}: a gap or a repeat")
        elif not _ends_segment(before) and _segment(unit) != _segment(before):
            raise StageFailedError(f"segment {_segment(unit)} began before segment {_segment(before)} ended")

    def _hold(self, array: NDArray[Any]) -> None:
        self._held.append(array)
        self._end += len(array)

    def _take(self, unit: Units, ends: bool) -> Units:
        array = np.concatenate([array_of(unit)[:0], *self._held])
        position, self._start, self._held = self._start, self._end, []
        self._made += 1
        if isinstance(unit, LatentChunk):
            return replace(unit, position=position, rows=array, ends_segment=ends)
        return replace(unit, position=position, frames=array)


def array_of(unit: Units) -> NDArray[Any]:
    """The unit's frames [n, codebooks] or rows [n, width]."""
    return unit.rows if isinstance(unit, LatentChunk) else unit.frames


def _ends_segment(unit: Units) -> bool:
    return isinstance(unit, LatentChunk) and unit.ends_segment


def _segment(unit: Units) -> int:
    return unit.segment if isinstance(unit, LatentChunk) else 0
