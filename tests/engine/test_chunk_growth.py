"""Chunk growth: a stream is cut by how far it is ahead of its listener."""

from collections.abc import Sequence

import numpy as np
import pytest
from pydantic import ValidationError

from omni_ray.engine.chunk_growth import ChunkGrowth, Growth
from omni_ray.engine.lead import Lead
from omni_ray.engine.options import CodecOptions
from omni_ray.engine.rechunk import Rechunker
from omni_ray.engine.types import CodeFrameChunk, Request
from omni_ray.playback import Playback

FRAME_S = 0.08
DECODE_S = 0.2
SCHEDULE = (4, 8, 16, 25)


class Stream:
    """A codec's work on one request, at simulated times: frames come, chunks are decoded in no time and heard."""

    def __init__(self, growth: Growth) -> None:
        self.now = 100.0
        self.heard = Playback()
        self.sizes: list[int] = []
        self._lead = Lead(Request("r", seed=0), lambda: self.now)
        self._growth = ChunkGrowth(SCHEDULE, growth, self._lead, DECODE_S)
        self._rechunker = Rechunker(self._growth.size)
        self._frames = 0

    def come(self, gaps_s: Sequence[float]) -> None:
        """One frame after each of these gaps."""
        for gap in gaps_s:
            self.now += gap
            for chunk in self._rechunker.push(CodeFrameChunk(self._frames, np.zeros((1, 16), np.int64))):
                self.sizes.append(len(chunk.frames))
                self.heard.arrived(self.now, len(chunk.frames) * FRAME_S)
                self._growth.decoded(sum(self.sizes), sum(self.sizes) * FRAME_S)
                self._lead.emitted(sum(self.sizes) * FRAME_S)
            self._frames += 1


def test_a_stream_as_fast_as_its_listener_never_waits_for_a_large_chunk() -> None:
    """4 frames and then 8 left a listener without sound for as long as 4 frames take to come."""
    fixed, grown = Stream("schedule"), Stream("lead")
    for stream in (fixed, grown):
        stream.come([FRAME_S] * 60)
    assert fixed.sizes == [4, 8, 16, 25]
    assert fixed.heard.underrun_s == pytest.approx((8 - 4) * FRAME_S + (16 - 8) * FRAME_S + (25 - 16) * FRAME_S)
    assert set(grown.sizes) == {4}
    assert grown.heard.underrun_s == pytest.approx(0, abs=1e-6)


def test_a_fast_stream_grows_to_the_largest_chunk() -> None:
    stream = Stream("lead")
    stream.come([FRAME_S / 7] * 200)
    assert stream.sizes == [4, 4, 4, 8, *[25] * 7]
    assert stream.heard.underrun_s == 0


def test_a_stream_that_slows_down_goes_back_to_small_chunks() -> None:
    stream = Stream("lead")
    stream.come([FRAME_S / 7] * 45)
    assert stream.sizes[-1] == 25
    stream.come([FRAME_S * 1.2] * 150)
    assert sorted(stream.sizes[5:], reverse=True) == stream.sizes[5:]
    assert stream.sizes[-1] == 4


def test_a_chunk_whose_frames_come_late_is_cut_in_time() -> None:
    """10 of 25 frames are in hand when the lead no longer lasts for 6 more, which would make 16, and their decoding."""
    stream = Stream("lead")
    stream.come([0.01] * 55)
    before, lead_s = stream.sizes[:], stream.heard.lead_s(stream.now)
    assert (before[-1], sum(before)) == (25, 45)
    assert lead_s is not None
    stream.come([lead_s - 6 * FRAME_S])
    assert stream.sizes == [*before, 11]
    assert stream.heard.underrun_s == 0


def test_the_first_chunk_and_the_schedule_as_a_limit_do_not_depend_on_the_lead() -> None:
    clock = [0.0]
    lead = Lead(Request("r", seed=0), lambda: clock[0])
    growth = ChunkGrowth((4, 4, 8), "lead", lead, DECODE_S)
    assert growth.size(0, 0) == 4
    growth.decoded(4, 4 * FRAME_S)
    lead.emitted(1000.0)
    assert [growth.size(made, 0) for made in (1, 2, 3)] == [4, 8, 8]
    clock[0] = 2000.0
    assert growth.size(9, 0) == 4


def test_what_is_heard_already_is_replayed_by_the_schedule() -> None:
    """A request that goes on here has no lead before it gives out something new."""
    growth = ChunkGrowth(SCHEDULE, "lead", Lead(Request("r", seed=0)), DECODE_S)
    growth.decoded(0, 0.0)
    assert [growth.size(made, 0) for made in range(5)] == [4, 8, 16, 25, 25]


def test_options() -> None:
    with pytest.raises(ValidationError, match="chunk_growth: lead depends on the time"):
        CodecOptions(deterministic=True, chunk_growth="lead")
    with pytest.raises(ValidationError, match="greater than 0"):
        CodecOptions(chunk_frames=(4, 0))
