"""A stream's way out: the first event at once, then small lists, nothing lost, nothing reordered."""

import asyncio
import pickle
import time
from collections.abc import AsyncIterator
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_ray.engine.types import AudioChunk, CodeFrameChunk, LatentChunk, TextChunk
from omni_ray.serve.events import Event, Opened, OutputEvent, RecordEvent
from omni_ray.serve.outbox import MAX_BATCH_BYTES, Outbox, pieces_of

timeless = pytest.mark.usefixtures("virtual_time")


def text(n: int) -> OutputEvent:
    return OutputEvent("thinker", TextChunk(n, str(n)))


def sound(n: int, nbytes: int) -> OutputEvent:
    return OutputEvent("code2wav", AudioChunk(n, np.zeros(nbytes // 4, np.float32), 24000))


def flat(batches: list[list[Event]]) -> list[Event]:
    return [event for batch in batches for event in batch]


async def rest(batches: AsyncIterator[list[Event]]) -> list[list[Event]]:
    return [batch async for batch in batches]


@timeless
async def test_first_event_leaves_at_once():
    """Time to first audio must not contain the coalescing time."""
    outbox = Outbox(coalesce_ms=10_000)
    outbox.put(text(0))
    async with asyncio.timeout(5):
        assert await anext(outbox.batches()) == [text(0)]


@timeless
async def test_later_events_are_collected():
    outbox = Outbox(coalesce_ms=60)
    batches = outbox.batches()
    outbox.put(text(-1))
    await anext(batches)
    await asyncio.sleep(0.5)
    outbox.put(text(0))
    await anext(batches)
    started = time.monotonic()
    waiting = asyncio.ensure_future(anext(batches))
    for n in range(1, 6):
        outbox.put(text(n))
        await asyncio.sleep(0.002)
    assert await waiting == [text(n) for n in range(1, 6)]
    assert time.monotonic() - started == pytest.approx(0.06)


@timeless
async def test_a_young_stream_s_events_wait_for_next_to_nothing():
    """The first tokens and frames are what the first sound is made of."""
    outbox = Outbox(coalesce_ms=10_000)
    batches = outbox.batches()
    started = time.monotonic()
    for n in range(5):
        outbox.put(text(n))
        assert await anext(batches) == [text(n)]
        await asyncio.sleep(0.02)
    assert time.monotonic() - started < 0.11


@timeless
async def test_the_first_sound_leaves_at_once_whatever_text_left_just_before():
    outbox = Outbox(coalesce_ms=10_000)
    batches = outbox.batches()
    outbox.put(text(0))
    await anext(batches)
    outbox._began -= 100  # the stream is old: further text would be collected for ten seconds
    waiting = asyncio.ensure_future(anext(batches))
    outbox.put(text(1))
    await asyncio.sleep(5)
    assert not waiting.done()
    outbox.put(sound(0, 4_000))
    async with asyncio.timeout(5):
        assert [event.output.position for event in await waiting] == [1, 0]


@timeless
async def test_an_event_after_a_pause_leaves_at_once():
    """Coalescing is a shortest distance between lists, not a delay added to each."""
    outbox = Outbox(coalesce_ms=800)
    batches = outbox.batches()
    outbox.put(text(0))
    await anext(batches)
    await asyncio.sleep(0.8)
    outbox.put(text(1))
    started = time.monotonic()
    await anext(batches)
    assert time.monotonic() == started


async def test_no_coalescing():
    outbox = Outbox(coalesce_ms=0)
    batches = outbox.batches()
    for n in range(3):
        outbox.put(text(n))
        assert await anext(batches) == [text(n)]


@timeless
async def test_close_ends_the_wait():
    """The end of a stream never waits for the coalescing time."""
    outbox = Outbox(coalesce_ms=10_000)
    batches = outbox.batches()
    outbox.put(text(0))
    await anext(batches)
    waiting = asyncio.ensure_future(rest(batches))
    await asyncio.sleep(0.005)
    outbox.put(text(1))
    outbox.close()
    async with asyncio.timeout(5):
        assert await waiting == [[text(1)]]


async def test_close_without_events():
    outbox = Outbox(20)
    outbox.close()
    assert await rest(outbox.batches()) == []


async def test_error_comes_after_the_events():
    """What was computed before a failure still reaches the client, then the error does."""
    outbox = Outbox(20)
    outbox.put(text(0))
    outbox.close(ValueError("boom"))
    batches = outbox.batches()
    assert await anext(batches) == [text(0)]
    with pytest.raises(ValueError, match="boom"):
        await anext(batches)


async def test_the_first_close_counts():
    """A run that failed is then torn down, which closes again without an error."""
    outbox = Outbox(20)
    outbox.close(ValueError("boom"))
    outbox.close()
    with pytest.raises(ValueError, match="boom"):
        await rest(outbox.batches())


async def test_consumer_may_stop_at_any_time():
    outbox = Outbox(20)
    batches = outbox.batches()
    outbox.put(text(0))
    await anext(batches)
    waiting = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    outbox.put(text(1))


async def test_lists_stay_far_below_the_transports_cap():
    """Serve's gRPC transport refuses messages over 4 MB; three seconds of sound here are cut into lists of 1 MB."""
    outbox = Outbox(20)
    events = [sound(n, 300_000) for n in range(9)]
    for event in events:
        outbox.put(event)
    outbox.close()
    batches = await rest(outbox.batches())
    assert [len(batch) for batch in batches] == [3, 3, 3]
    assert [event.output.position for event in flat(batches)] == list(range(9))


async def test_a_huge_event_is_alone():
    outbox = Outbox(20)
    for event in (text(0), sound(1, MAX_BATCH_BYTES * 3), text(2)):
        outbox.put(event)
    outbox.close()
    assert [len(batch) for batch in await rest(outbox.batches())] == [1, 1, 1]


@pytest.mark.parametrize(
    "output",
    [
        AudioChunk(0, np.zeros(200_000, np.float32), 24000),
        LatentChunk(0, np.zeros((200, 1000), np.float32)),
        CodeFrameChunk(0, np.zeros((50_000, 2), np.int64)),
    ],
)
async def test_every_array_counts(output):
    outbox = Outbox(20)
    for _ in range(4):
        outbox.put(OutputEvent("x", output))
    outbox.close()
    assert len(await rest(outbox.batches())) > 1


@pytest.mark.parametrize(
    "output",
    [
        TextChunk(3, " w", (7, 8)),
        CodeFrameChunk(5, np.arange(32).reshape(2, 16)),
        AudioChunk(9, np.arange(6, dtype=np.float32), 24_000),
    ],
)
def test_what_is_pickled_in_a_way_of_its_own_arrives_whole(output):
    for event in (OutputEvent("x", output, sent_at=1.5), RecordEvent("x", output)):
        arrived = pickle.loads(pickle.dumps(event))
        assert type(arrived) is type(event)
        assert (arrived.stage, type(arrived.output)) == ("x", type(output))
        for field in fields(output):
            np.testing.assert_array_equal(getattr(arrived.output, field.name), getattr(output, field.name))


async def test_head_of_the_stream_goes_with_the_first_output():
    outbox = Outbox(20)
    head = Opened("thinker", "replica", {})
    outbox.put(head)
    outbox.put(text(0))
    assert await anext(outbox.batches()) == [head, text(0)]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["text", "sound", "big"]), st.sampled_from([0, 0, 0, 0.001, 0.003])), max_size=25
    ),
    st.sampled_from([0, 1, 3]),
    st.booleans(),
)
def test_nothing_is_lost_or_reordered(script, coalesce_ms, fails):
    """Any rhythm of events, any coalescing time: the same events, in order, in lists below the cap, then the end."""

    async def go() -> None:
        outbox = Outbox(coalesce_ms)
        sizes = {"sound": 4_000, "big": 700_000}

        async def produce() -> None:
            for n, (kind, pause) in enumerate(script):
                outbox.put(text(n) if kind == "text" else sound(n, sizes[kind]))
                await asyncio.sleep(pause)
            outbox.close(KeyError("end") if fails else None)

        producing = asyncio.ensure_future(produce())
        got: list[list[Event]] = []
        async with asyncio.timeout(30):
            try:
                async for batch in outbox.batches():
                    got.append(batch)
                    await asyncio.sleep(0)
            except KeyError:
                assert fails
            else:
                assert not fails
        await producing
        assert [event.output.position for event in flat(got)] == list(range(len(script)))
        assert all(got)
        for batch in got:
            nbytes = sum(e.output.samples.nbytes for e in batch if isinstance(e.output, AudioChunk))
            assert nbytes <= MAX_BATCH_BYTES or len(batch) == 1

    asyncio.run(go())


async def test_an_error_before_any_output_shows_nothing() -> None:
    """A replica that dies before its first output left only the head of a stream: a retry must still be possible."""
    outbox = Outbox(20)
    outbox.put(Opened("talker", "r1", {}))
    outbox.close(KeyError("gone"))
    with pytest.raises(KeyError):
        await anext(outbox.batches())


async def test_a_large_chunk_is_cut_to_fit_a_message() -> None:
    """Serve's gRPC messages end at 4 MB: a long chunk leaves in pieces."""
    samples = np.arange(3_000_000, dtype=np.float32)
    pieces = list(pieces_of(AudioChunk(7, samples, 24000)))
    assert all(piece.samples.nbytes <= MAX_BATCH_BYTES for piece in pieces)
    assert [piece.position for piece in pieces] == [7 + n * 250_000 for n in range(12)]
    assert np.array_equal(np.concatenate([piece.samples for piece in pieces]), samples)
