"""Records: what a stage made, kept by the ingress so that another replica can go on where one died.

Records travel inside the lists that carry sound and text anyway, never in a message of their own. A record enters an
outbox before anything that was computed from it, so what the ingress holds at any moment is complete: everything that
any of its outputs depends on is there too, or is computed again without ever having been seen.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final, TypeGuard

import numpy as np
from numpy.typing import NDArray

from omni_ray.engine.resume import Resume
from omni_ray.engine.types import (
    AudioChunk,
    CodeFrameChunk,
    Finish,
    ImageChunk,
    Output,
    StepChunk,
    TextChunk,
    TranscriptChunk,
)
from omni_ray.errors import StageFailedError
from omni_ray.serve.events import Record, RecordEvent

MAX_RECORD_BYTES: Final = 2_000_000
"""Most that one request's records may take: they travel in an envelope, and Serve's gRPC messages end at 4 MB. That is
20 minutes of frames of 16 codebooks; a request beyond it is no longer taken over."""


def recordable(output: Output) -> TypeGuard[Record]:
    """Whether an inner stage's output travels as a record."""
    return isinstance(output, TextChunk | TranscriptChunk | CodeFrameChunk | Finish)


def merged(events: Sequence[RecordEvent]) -> list[RecordEvent]:
    """The same records in fewer events: neighbours of one stage and kind become one."""
    out: list[RecordEvent] = []
    for event in events:
        last = next((i for i in range(len(out) - 1, -1, -1) if out[i].stage == event.stage), None)
        joined = None if last is None else _joined(out[last].output, event.output)
        if last is None or joined is None:
            out.append(event)
        else:
            out[last] = RecordEvent(event.stage, joined)
    return out


def _joined(first: Record, second: Record) -> Record | None:
    if isinstance(first, CodeFrameChunk) and isinstance(second, CodeFrameChunk):
        return CodeFrameChunk(first.position, np.concatenate([first.frames, second.frames]))
    if isinstance(first, TextChunk) and isinstance(second, TextChunk):
        return TextChunk(first.position, first.text + second.text, first.token_ids + second.token_ids)
    return None


class StageRecord:
    """What the ingress has of one stage, over all attempts.

    Attributes:
        nbytes: what the record takes in an envelope.
    """

    def __init__(self, stage: str) -> None:
        self.nbytes = 0
        self._stage = stage
        self._kept = True
        self._text: list[TextChunk] = []
        self._chars = self._tokens = 0
        self._replayed_chars = 0  # of this attempt
        self._transcripts: list[TranscriptChunk] = []
        self._frames: list[NDArray[np.int64]] = []
        self._frame_count = 0
        self._samples = 0
        self._rows = self._steps = 0  # of pictures, and of their denoising
        self._finish: Finish | None = None

    def restart(self) -> None:
        """A new attempt begins: what comes now may be known."""
        self._replayed_chars = 0

    def forget(self) -> None:
        """No further attempt will begin: keep only how far this stage has come."""
        self._kept = False
        self._text, self._frames = [], []

    def new(self, output: Output) -> Output | None:
        """Take an output; what of it was not known, None if all was.

        Raises:
            StageFailedError: it does not follow what is known.
        """
        match output:
            case TextChunk():
                return self._new_text(output)
            case AudioChunk():
                return self._new_sound(output)
            case CodeFrameChunk():
                return self._new_frames(output)
            case TranscriptChunk():
                if self._skip(output.position, 1, len(self._transcripts)):
                    return None
                self._transcripts.append(output)
                self.nbytes += len(output.text.encode()) + 32
                return output
            case ImageChunk():
                return self._new_rows(output)
            case StepChunk():
                if self._skip(output.position, 1, self._steps):
                    return None
                self._steps += 1
                return output
            case Finish():
                known, self._finish = self._finish, self._finish or output
                return output if known is None else None
            case _:
                return output

    def resume(self) -> Resume:
        """Everything so far, as the stage's next attempt takes it."""
        return Resume(
            text=tuple(self._text),
            transcripts=tuple(self._transcripts),
            frames=np.concatenate(self._frames) if self._frames else None,
            samples=self._samples,
            finish=self._finish,
        )

    def _new_text(self, chunk: TextChunk) -> TextChunk | None:
        # Characters are counted, not tokens: a token's text may be given out in two parts.
        start = self._replayed_chars
        self._replayed_chars += len(chunk.text)
        text = chunk.text[max(0, self._chars - start) :]
        ids = chunk.token_ids[max(0, self._tokens - chunk.position) :]
        if not text and not ids:
            return None
        new = replace(chunk, position=max(chunk.position, self._tokens), text=text, token_ids=ids)
        if self._kept:
            self._text.append(new)
        self._chars += len(text)
        self._tokens += len(ids)
        self.nbytes += len(text.encode()) + 8 * len(ids) + 32
        return new

    def _new_sound(self, chunk: AudioChunk) -> AudioChunk | None:
        skipped = self._skip(chunk.position, len(chunk.samples), self._samples)
        if skipped == len(chunk.samples):
            return None
        self._samples = chunk.position + len(chunk.samples)
        if not skipped:
            return chunk
        return AudioChunk(chunk.position + skipped, chunk.samples[skipped:], chunk.sample_rate)

    def _new_rows(self, chunk: ImageChunk) -> ImageChunk | None:
        skipped = self._skip(chunk.position, len(chunk.pixels), self._rows)
        if skipped == len(chunk.pixels):
            return None
        self._rows = chunk.position + len(chunk.pixels)
        return replace(chunk, position=chunk.position + skipped, pixels=chunk.pixels[skipped:], row=chunk.row + skipped)

    def _new_frames(self, chunk: CodeFrameChunk) -> CodeFrameChunk | None:
        skipped = self._skip(chunk.position, len(chunk.frames), self._frame_count)
        if skipped == len(chunk.frames):
            return None
        new = CodeFrameChunk(chunk.position + skipped, chunk.frames[skipped:])
        if self._kept:
            self._frames.append(new.frames)
        self._frame_count += len(new.frames)
        self.nbytes += new.frames.nbytes
        return new

    def _skip(self, position: int, count: int, known: int) -> int:
        """How many of ``count`` items from ``position`` on are known."""
        if position > known:
            raise StageFailedError(f"stage {self._stage}: position {position} came where {known} was due")
        return min(count, known - position)


def total_bytes(records: Iterable[StageRecord]) -> int:
    """What a request's records take together."""
    return sum(record.nbytes for record in records)
