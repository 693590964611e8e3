"""Chunk sizes: how many frames a stream's next chunk takes, by a schedule and by its lead."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from omni_ray.engine.lead import Lead

Growth: TypeAlias = Literal["schedule", "lead"]


class ChunkGrowth:
    """The sizes of one request's chunks.

    The schedule says how large a chunk may be. With growth by ``lead`` it takes the largest of the schedule's sizes
    for which the listener has enough in hand: the frames that it still lacks, should they come no faster than they are
    heard, and its decoding. A stream whose frames come as slowly as that stays at the smallest size, instead of running
    dry while a large chunk fills; and a chunk whose frames come late is cut before it is full.
    """

    def __init__(self, schedule: Sequence[int], growth: Growth, lead: Lead, decode_s: float) -> None:
        """Begin a request.

        Args:
            schedule: frames in successive chunks; the last one repeats.
            growth: ``schedule`` takes these sizes and asks nothing else.
            lead: the request's.
            decode_s: how long a chunk may be on its way through the codec.
        """
        self._schedule = schedule
        self._lead = lead if growth == "lead" else None
        self._decode_s = decode_s
        self._frame_s = 0.0

    def decoded(self, frames: int, seconds: float) -> None:
        """So many frames in all gave so much sound in all."""
        if frames:
            self._frame_s = seconds / frames

    def size(self, made: int, held: int) -> int:
        """Frames of the next chunk, after ``made`` chunks and with ``held`` frames in hand; the first has its own size.

        It is what the lead allows right now: the lead melts, so there may be more in hand by then.
        """
        most = self._schedule[min(made, len(self._schedule) - 1)]
        lead_s = None if self._lead is None else self._lead.seconds()
        if lead_s is None:
            return most
        lacks = (lead_s - self._decode_s) / self._frame_s if self._frame_s else 0
        return max((size for size in self._schedule if size <= min(most, held + lacks)), default=min(self._schedule))
