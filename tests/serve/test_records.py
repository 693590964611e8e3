"""What the ingress keeps for a takeover: nothing twice, nothing lost, bounded; and how often a request begins again."""

import asyncio
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omni_ray.config.ingress import IngressConfig
from omni_ray.engine.types import (
    AudioChunk,
    CodeFrameChunk,
    Finish,
    ImageChunk,
    Output,
    Request,
    StepChunk,
    TextChunk,
    TranscriptChunk,
    Usage,
)
from omni_ray.errors import ReplicaDiedError, SaturatedError, StageFailedError, StageSilentError, TakeoverRefusedError
from omni_ray.models.ramp.pipeline import PIPELINE
from omni_ray.serve import attempts as attempts_module
from omni_ray.serve.attempts import Attempts, Patience, Tenants
from omni_ray.serve.events import Envelope, Event, Opened, OutputEvent, RecordEvent
from omni_ray.serve.planner import make_plan
from omni_ray.serve.records import StageRecord, merged


def cut(n: int, sizes: list[int]) -> list[tuple[int, int]]:
    """0..n in pieces of the given sizes, the last one repeated."""
    pieces, at = [], 0
    for size in [*sizes, *[sizes[-1]] * n]:
        if at >= n:
            break
        pieces.append((at, min(n, at + size)))
        at += size
    return pieces


def texts(words: list[str], sizes: list[int]) -> list[TextChunk]:
    return [TextChunk(a, "".join(words[a:b]), tuple(range(a, b))) for a, b in cut(len(words), sizes)]


SIZES = st.lists(st.integers(1, 7), min_size=1, max_size=5)


@given(st.integers(1, 40), SIZES, SIZES, st.integers(0, 40))
def test_text_is_given_out_once(n: int, before: list[int], after: list[int], seen: int) -> None:
    """However the second attempt is cut, and wherever the first one stopped."""
    words = [f"{k} " for k in range(n)]
    record = StageRecord("thinker")
    out = [record.new(chunk) for chunk in texts(words, before)[:seen]]
    record.restart()
    out += [record.new(chunk) for chunk in texts(words, after)]
    assert "".join(chunk.text for chunk in out if chunk is not None) == "".join(words)
    assert record.resume().token_ids == tuple(range(n))


@given(st.integers(1, 40), SIZES, SIZES, st.integers(0, 40))
def test_frames_and_sound_are_given_out_once(n: int, before: list[int], after: list[int], seen: int) -> None:
    frames, sound = np.arange(2 * n).reshape(n, 2), np.arange(n, dtype=np.float32)
    talker, code2wav = StageRecord("talker"), StageRecord("code2wav")
    heard: list[Any] = []
    for sizes, stop in ((before, seen), (after, None)):
        for record in (talker, code2wav):
            record.restart()
        for a, b in cut(n, sizes)[:stop]:
            talker.new(CodeFrameChunk(a, frames[a:b]))
            heard.append(code2wav.new(AudioChunk(a, sound[a:b], 24000)))
    assert np.array_equal(np.concatenate([chunk.samples for chunk in heard if chunk is not None]), sound)
    kept = talker.resume().frames
    assert kept is not None
    assert np.array_equal(kept, frames)
    assert code2wav.resume().samples == n


def test_a_picture_painted_again_goes_on_where_it_stopped() -> None:
    """Whatever pieces its rows come in; steps count too."""
    pixels = np.arange(10 * 4 * 3, dtype=np.uint8).reshape(10, 4, 3)
    record = StageRecord("painter")
    assert record.new(StepChunk(0, 1, 2)) == StepChunk(0, 1, 2)
    assert isinstance(record.new(ImageChunk(0, pixels[:6], 0, 10)), ImageChunk)
    record.restart()
    assert record.new(StepChunk(0, 1, 2)) is None
    assert record.new(StepChunk(1, 2, 2)) == StepChunk(1, 2, 2)
    assert record.new(ImageChunk(0, pixels[:4], 0, 10)) is None
    rest = record.new(ImageChunk(4, pixels[4:], 4, 10))
    assert isinstance(rest, ImageChunk)
    assert (rest.position, rest.row, rest.height, rest.ends_picture) == (6, 6, 10, True)
    np.testing.assert_array_equal(rest.pixels, pixels[6:])
    with pytest.raises(StageFailedError, match="position 11 came where 10 was due"):
        record.new(ImageChunk(11, pixels, 0, 10))


def test_a_gap_is_an_error() -> None:
    """Never silently: a listener would hear it."""
    record = StageRecord("talker")
    with pytest.raises(StageFailedError, match="position 3 came where 0 was due"):
        record.new(CodeFrameChunk(3, np.zeros((1, 2), np.int64)))


def test_segments_and_the_end_are_given_out_once() -> None:
    record = StageRecord("listener")
    outputs: list[Output] = [TranscriptChunk(0, 0, "one", 0, 1), TranscriptChunk(1, 0, "two", 1, 2), Finish()]
    assert [record.new(output) for output in outputs] == outputs
    record.restart()
    assert [record.new(output) for output in outputs] == [None, None, None]
    assert record.resume().finish == Finish()


def test_neighbours_become_one_event() -> None:
    """A frame a step, but one event a message."""
    frames = [RecordEvent("talker", CodeFrameChunk(k, np.full((1, 16), k))) for k in range(25)]
    words = [RecordEvent("thinker", TextChunk(k, f"{k}", (k,))) for k in range(3)]
    end = RecordEvent("thinker", Finish())
    mixed = [frames[0], words[0], frames[1], words[1], words[2], end, *frames[2:]]
    made = merged(mixed)
    assert [event.stage for event in made] == ["talker", "thinker", "thinker"]
    first, second, third = (event.output for event in made)
    assert isinstance(first, CodeFrameChunk)
    assert (first.position, first.frames[:, 0].tolist()) == (0, list(range(25)))
    assert second == TextChunk(0, "012", (0, 1, 2))
    assert third == Finish()


def begun(tenants: Tenants | None = None, name: str = "r", **ingress: Any) -> Attempts:
    plan = make_plan(PIPELINE, {"text", "audio"}, {"messages"})
    return Attempts(
        IngressConfig(**ingress), tenants or Tenants(), Envelope(Request(name, seed=1), plan), Patience(1.0)
    )


def opened(attempts: Attempts, replica: str, resumable: bool = True) -> None:
    for stage in ("thinker", "code2wav"):
        attempts.take(Opened(stage, f"{stage} of {replica}", {}, "v1", True))
    attempts.take(Opened("talker", replica, {}, "v1", resumable))


SOUND: Event = OutputEvent("code2wav", AudioChunk(0, np.zeros(4, np.float32), 24000))
SILENT = StageSilentError("stage talker sent nothing for 45 s")
DIED = ReplicaDiedError("a replica of stage talker died", stage="talker")


async def test_nothing_shown_is_retried_once() -> None:
    attempts = begun()
    attempts.again(DIED)
    assert attempts.envelope.request.key == ("r", 1)
    assert not attempts.envelope.resume
    with pytest.raises(ReplicaDiedError):
        attempts.again(DIED)


async def test_what_spoke_is_taken_over_with_its_records() -> None:
    attempts = begun()
    opened(attempts, "a")
    frames = np.arange(6).reshape(3, 2)
    assert attempts.take(RecordEvent("talker", CodeFrameChunk(0, frames))) is None
    assert attempts.take(SOUND) is SOUND
    attempts.again(DIED)
    recorded = attempts.envelope.resume["talker"]
    assert recorded.version == "v1"
    assert recorded.resume.frames is not None
    assert np.array_equal(recorded.resume.frames, frames)
    assert attempts.envelope.resume["code2wav"].resume.samples == 4
    assert attempts.envelope.request.key == ("r", 1)


async def test_alone_on_two_that_died() -> None:
    """A poison request: the second death ends it, however many takeovers are allowed."""
    attempts = begun(max_takeovers=9)
    opened(attempts, "a")
    attempts.take(SOUND)
    attempts.again(DIED)
    opened(attempts, "b")
    with pytest.raises(ReplicaDiedError):
        attempts.again(DIED)


async def test_a_silence_is_survived_once() -> None:
    """A node that is gone without a word; a request that hangs its stage must not go on to hang all of them."""
    attempts = begun(max_takeovers=9)
    opened(attempts, "a")
    attempts.take(SOUND)
    attempts.again(SILENT)
    assert attempts.envelope.resume["code2wav"].resume.samples == 4
    opened(attempts, "b")
    with pytest.raises(StageSilentError):
        attempts.again(SILENT)
    attempts.again(DIED)


async def test_in_company_it_is_not_to_blame(virtual_time: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One death hits several requests, one after the other: none of them may count as alone because others left."""
    monkeypatch.setattr(attempts_module, "LINGER_S", 0.05)
    tenants = Tenants()
    together = [begun(tenants, name, max_takeovers=3) for name in ("r", "s")]
    for replica in ("a", "b", "c"):
        for attempts in together:
            opened(attempts, replica)
            attempts.take(SOUND)
        for attempts in together:
            attempts.again(DIED)
    for attempts in together:
        opened(attempts, "d")
    with pytest.raises(ReplicaDiedError):
        together[0].again(DIED)  # three takeovers were allowed
    for attempts in together:
        attempts.close()
    await asyncio.sleep(0.1)
    assert not tenants._on


@pytest.mark.parametrize("takeover", [True, False])
async def test_whose_answer_is_whole_needs_no_other_attempt(takeover: bool) -> None:
    """A replica that died between its last output and the end of its stream failed the answer, or made it again."""
    attempts = begun(takeover=takeover)
    opened(attempts, "a")
    attempts.take(SOUND)
    attempts.take(OutputEvent("code2wav", Finish()))
    attempts.take(RecordEvent("thinker", Finish()))
    assert attempts.unfinished == {"thinker"}
    attempts.take(OutputEvent("thinker", Finish()))
    assert not attempts.unfinished


async def test_switched_off() -> None:
    attempts = begun(takeover=False)
    assert not attempts.envelope.records
    assert attempts.take(SOUND) is SOUND
    with pytest.raises(ReplicaDiedError):
        attempts.again(DIED)


async def test_an_engine_that_cannot_go_on() -> None:
    attempts = begun()
    opened(attempts, "a", resumable=False)
    attempts.take(SOUND)
    with pytest.raises(TakeoverRefusedError, match="a replica of stage talker died, and stage talker cannot go on"):
        attempts.again(DIED)


async def test_records_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit the request goes on without the safety, and the records are let go of."""
    monkeypatch.setattr(attempts_module, "MAX_RECORD_BYTES", 1000)
    attempts = begun()
    opened(attempts, "a")
    attempts.take(SOUND)
    for k in range(20):
        attempts.take(RecordEvent("talker", CodeFrameChunk(k, np.zeros((1, 16), np.int64))))
    assert attempts._records["talker"].resume().frames is None
    with pytest.raises(ReplicaDiedError):
        attempts.again(DIED)


async def test_no_room_is_waited_for_only_in_mid_stream(virtual_time: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts_module, "WAIT_FOR_ROOM_S", 0.4)
    attempts = begun()
    full = SaturatedError("full")
    with pytest.raises(SaturatedError):
        await attempts.wait(full)
    opened(attempts, "a")
    attempts.take(SOUND)
    for _ in range(3):
        await attempts.wait(full)
    with pytest.raises(SaturatedError):  # a second is over
        await attempts.wait(full)


async def test_all_silences_together_are_bounded(virtual_time: None) -> None:
    """Each attempt was short of its deadline; one request hung for over a minute (chaos run)."""
    attempts = begun(max_takeovers=9)
    opened(attempts, "a")
    attempts.take(SOUND)
    for _ in range(2):
        attempts.patience.renew()  # the next replica speaks; that gives no second back
        await asyncio.sleep(0.4)
        attempts.again(DIED)
        assert attempts.patience.left_s > 0
    attempts.patience.renew()
    await asyncio.sleep(0.4)
    with pytest.raises(ReplicaDiedError):
        attempts.again(DIED)


async def test_usage_counts_once() -> None:
    attempts = begun()
    opened(attempts, "a")
    end = OutputEvent("thinker", Finish("stop", Usage(3, 4)))
    assert attempts.take(end) is end
    attempts.again(DIED)
    assert attempts.envelope.resume["thinker"].resume.finish == end.output
    assert attempts.take(end) is None
