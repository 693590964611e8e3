"""A request's events as what an answer is made of: text, segments, encoded sound, pictures, and one end after them.

Streamed answers send these one by one; a whole answer is literally the same deltas, collected (C18).
"""

from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from omni_ray.config.pipeline import OutputKind
from omni_ray.engine.types import (
    AudioChunk,
    Finish,
    FinishReason,
    ImageChunk,
    StepChunk,
    TextChunk,
    TranscriptChunk,
)
from omni_ray.errors import StageFailedError
from omni_ray.serve.api.pictures import Picture, Pictures
from omni_ray.serve.api.sound import Sound
from omni_ray.serve.api.usage import UsageTotals
from omni_ray.serve.events import OutputEvent
from omni_ray.serve.planner import Plan


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text."""

    text: str


@dataclass(frozen=True, slots=True)
class SegmentDelta:
    """A recognised segment."""

    segment: TranscriptChunk


@dataclass(frozen=True, slots=True)
class AudioDelta:
    """New bytes of the one encoded stream; never empty."""

    data: bytes


@dataclass(frozen=True, slots=True)
class Ended:
    """After the last final stage ended. ``last`` is the kind of output that ended last."""

    reason: FinishReason
    usage: UsageTotals
    last: OutputKind


@dataclass(frozen=True, slots=True)
class StepDelta:
    """Step ``step`` of ``steps`` of a picture is done."""

    step: int
    steps: int


@dataclass(frozen=True, slots=True)
class PictureDelta:
    """A picture, or what it looks like so far."""

    picture: Picture


Delta = TextDelta | SegmentDelta | AudioDelta | StepDelta | PictureDelta | Ended


@dataclass(slots=True)
class _Ends:
    """Which final stages have ended, and how."""

    waiting: dict[str, OutputKind]
    usage: UsageTotals = field(default_factory=UsageTotals)
    reasons: dict[OutputKind, FinishReason] = field(default_factory=dict)

    def add(self, stage: str, finish: Finish) -> OutputKind:
        if stage not in self.waiting:
            raise StageFailedError(f"stage {stage} ended twice, or was not asked for")
        kind = self.waiting.pop(stage)
        self.usage.add(finish.usage)
        self.reasons[kind] = finish.reason
        return kind

    def reason(self) -> FinishReason:
        """What cut the answer, if anything did; what ended the text counts first."""
        said = sorted(self.reasons.items(), key=lambda item: item[0] != "text")
        return next((reason for _, reason in said if reason != "stop"), "stop")


async def deltas_of(
    events: AsyncIterator[OutputEvent], plan: Plan, sound: Sound | None, pictures: Pictures | None = None
) -> AsyncGenerator[Delta, None]:
    """Deltas of ``events`` in order, then exactly one ``Ended``.

    Raises:
        StageFailedError: the stream ended before every final stage did, or audio came without a ``sound``, or a picture
            without ``pictures``.
    """
    ends = _Ends({stage: kind for kind, stage in plan.outputs})
    async for event in events:
        output = event.output
        if isinstance(output, TextChunk):
            if output.text:
                yield TextDelta(output.text)
        elif isinstance(output, TranscriptChunk):
            yield SegmentDelta(output)
        elif isinstance(output, AudioChunk) and sound is not None:
            if piece := await sound.write(output):
                yield AudioDelta(piece)
        elif isinstance(output, StepChunk):
            yield StepDelta(output.step, output.steps)
        elif isinstance(output, ImageChunk) and pictures is not None:
            if (picture := await pictures.add(output)) is not None:
                yield PictureDelta(picture)
        elif isinstance(output, Finish):
            kind = ends.add(event.stage, output)
            if kind == "audio" and sound is not None and (piece := await sound.finish()):
                yield AudioDelta(piece)
            if not ends.waiting:
                yield Ended(ends.reason(), ends.usage, kind)
        else:
            raise StageFailedError(f"stage {event.stage} sent a {type(output).__name__} to the ingress")
    if ends.waiting:
        raise StageFailedError(f"the stream ended before {' and '.join(ends.waiting)} did")
