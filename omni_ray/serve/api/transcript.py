"""A transcript in OpenAI's shapes: events, JSON, verbose JSON, plain text, subtitles."""

from typing import Any

from omni_ray.engine.types import TranscriptChunk
from omni_ray.serve.api import sse
from omni_ray.serve.api.transcription_request import ResponseFormat
from omni_ray.serve.api.usage import UsageTotals, transcript_usage

_JSON = "application/json"
_TEXT = "text/plain; charset=utf-8"


class Transcript:
    """Segments of one clip, joined by blanks: a segment's text has none at its ends."""

    def __init__(self, *, duration_s: float, language: str | None, temperature: float) -> None:
        self._duration_s = duration_s
        self._language = language or "unknown"
        self._temperature = temperature
        self._segments: list[TranscriptChunk] = []

    def add(self, segment: TranscriptChunk) -> str:
        """Takes a segment; returns its text as it is joined to those before."""
        self._segments.append(segment)
        return segment.text if len(self._segments) == 1 else f" {segment.text}"

    def delta_event(self, segment: TranscriptChunk) -> bytes:
        """``transcript.text.delta``."""
        return sse.event({"type": "transcript.text.delta", "delta": self.add(segment)})

    def done_event(self, usage: UsageTotals) -> bytes:
        """``transcript.text.done``."""
        return sse.event({"type": "transcript.text.done", "text": self._text(), "usage": transcript_usage(usage)})

    def whole(self, response_format: ResponseFormat) -> tuple[str, bytes]:
        """Content type and body."""
        if response_format == "text":
            return _TEXT, f"{self._text()}\n".encode()
        if response_format == "srt":
            cues = (f"{i}\n{_times(s, ',')}\n{_cue(s)}\n" for i, s in enumerate(self._segments, 1))
            return "application/x-subrip; charset=utf-8", "\n".join(cues).encode()
        if response_format == "vtt":
            cues = (f"{_times(s, '.')}\n{_cue(s)}\n" for s in self._segments)
            return "text/vtt; charset=utf-8", "\n".join(("WEBVTT\n", *cues)).encode()
        duration = round(self._duration_s, 3)
        body: dict[str, Any] = {"text": self._text(), "usage": {"type": "duration", "seconds": duration}}
        if response_format == "verbose_json":
            segments = [self._segment(i, segment) for i, segment in enumerate(self._segments)]
            body |= {"task": "transcribe", "language": self._language, "duration": duration, "segments": segments}
        return _JSON, sse.json_bytes(body)

    def _text(self) -> str:
        return " ".join(segment.text for segment in self._segments)

    def _segment(self, index: int, segment: TranscriptChunk) -> dict[str, Any]:
        """OpenAI's fields; what our stages do not report is its neutral value."""
        return {
            "id": index,
            "seek": 0,
            "start": round(segment.start_s, 3),
            "end": round(segment.end_s, 3),
            "text": segment.text,
            "tokens": [],
            "temperature": self._temperature,
            "avg_logprob": 0.0,
            "compression_ratio": 1.0,
            "no_speech_prob": 0.0,
        }


def _cue(segment: TranscriptChunk) -> str:
    """The text of a subtitle: an empty line would end it, and an arrow be read as the next one's times."""
    return " ".join(segment.text.split()).replace("-->", "->")


def _times(segment: TranscriptChunk, point: str) -> str:
    return f"{_clock(segment.start_s, point)} --> {_clock(segment.end_s, point)}"


def _clock(seconds: float, point: str) -> str:
    millis = round(seconds * 1000)
    return f"{millis // 3_600_000:02}:{millis // 60_000 % 60:02}:{millis // 1000 % 60:02}{point}{millis % 1000:03}"
