"""The requests as they are sent, and what their answers mean: OpenAI's shapes, and vLLM-Omni's where they differ.

vLLM-Omni names each chat chunk's ``modality`` at the top level and puts base64 sound into ``delta.content``, one
complete WAV file per chunk; OpenAI and omni_ray put it into ``delta.audio.data``. Nobody has to say which server it is.
"""

import base64
import binascii
import json
from dataclasses import dataclass, field
from typing import Any

from omni_ray.bench.answer import Answer
from omni_ray.bench.sound import SoundMeter, UnreadableAnswerError
from omni_ray.bench.workload import Ask, Workload

PATHS = {"chat": "/chat/completions", "speech": "/audio/speech", "transcription": "/audio/transcriptions"}
OPENAI_RATE_HZ = 24_000


@dataclass(frozen=True, slots=True)
class Body:
    """A request's body: JSON, or a form with one file."""

    json: dict[str, Any] | None = None
    form: dict[str, str] = field(default_factory=dict)
    file: tuple[str, bytes] | None = None


def body_of(workload: Workload, ask: Ask, model: str) -> Body:
    """What is sent for ``ask``."""
    if workload.kind == "chat":
        return Body(json=_chat(workload, ask, model))
    if workload.kind == "speech":
        speech: dict[str, Any] = {
            "model": model,
            "input": ask.text,
            "response_format": "pcm",
            "stream": True,
            "stream_format": "audio",
            "seed": ask.seed,
        }
        if workload.voice is not None:
            speech["voice"] = workload.voice
        if workload.max_tokens is not None:
            speech["max_new_tokens"] = workload.max_tokens
        return Body(json=speech | workload.extra_body)
    assert ask.clip is not None
    form = {"model": model, "response_format": "json", "stream": "true"}
    form |= {k: v if isinstance(v, str) else json.dumps(v) for k, v in workload.extra_body.items()}
    return Body(form=form, file=(ask.clip.name, ask.clip.data))


def _chat(workload: Workload, ask: Ask, model: str) -> dict[str, Any]:
    content: Any = ask.text
    if ask.clip is not None:
        data = base64.b64encode(ask.clip.data).decode()
        sound = {"data": data, "format": ask.clip.name.rpartition(".")[2].lower()}
        content = [{"type": "input_audio", "input_audio": sound}, {"type": "text", "text": ask.text}]
    chat: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": content}],
        "modalities": ["text"] if workload.text_only else ["text", "audio"],
        "stream": True,
        "stream_options": {"include_usage": True},
        "seed": ask.seed,
    }
    if not workload.text_only:
        chat["audio"] = {"format": "pcm16"}
        if workload.voice is not None:
            chat["audio"]["voice"] = workload.voice
    if workload.max_tokens is not None:
        chat["max_tokens"] = workload.max_tokens
    return chat | workload.extra_body


class ChatReader:
    """Reads a chat's events into an ``Answer``."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._meter = SoundMeter(OPENAI_RATE_HZ)

    def event(self, data: bytes, at: float) -> None:
        """One event's data, which arrived at ``at``."""
        if data == b"[DONE]":
            return
        chunk = _object(data)
        if "error" in chunk:
            self._answer.fails("stream_error", _message(chunk["error"]))
            return
        for choice in chunk.get("choices") or []:
            delta = choice.get("delta") or {}
            content, audio = delta.get("content"), (delta.get("audio") or {}).get("data")
            if chunk.get("modality") == "audio" and isinstance(content, str) and not audio:
                audio, content = content, None
                if rate := (choice.get("audio_metadata") or {}).get("sample_rate_hz"):
                    self._meter.sample_rate = rate
            if isinstance(content, str):
                self._answer.says(content, at)
            if audio:
                self._answer.playback.arrived(at, self._meter.push(_decoded(audio), is_message=True))
        self._usage(chunk.get("usage") or {})

    def _usage(self, usage: dict[str, Any]) -> None:
        """Text tokens: omni_ray and OpenAI count sound into ``completion_tokens`` and say apart how many are text."""
        details = usage.get("completion_tokens_details") or {}
        tokens = details.get("text_tokens", usage.get("completion_tokens"))
        if tokens:  # vLLM-Omni's audio chunks carry a usage of zero
            self._answer.text_tokens = max(self._answer.text_tokens or 0, tokens)


class SpeechReader:
    """Reads a raw speech body into an ``Answer``."""

    def __init__(self, answer: Answer, headers: dict[str, str]) -> None:
        self._answer = answer
        rate, channels = headers.get("x-sample-rate", ""), headers.get("x-channels", "")
        self._meter = SoundMeter(
            int(rate) if rate.isdecimal() and int(rate) else OPENAI_RATE_HZ,
            int(channels) if channels.isdecimal() and int(channels) else 1,
        )

    def piece(self, data: bytes, at: float) -> None:
        """The next bytes."""
        self._answer.playback.arrived(at, self._meter.push(data, is_message=False))


class TranscriptReader:
    """Reads a transcript, as OpenAI's events, vLLM's chunks, or one JSON body, into an ``Answer``."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def event(self, data: bytes, at: float) -> None:
        """One event's data."""
        if data == b"[DONE]":
            return
        event = _object(data)
        if "error" in event:
            self._answer.fails("stream_error", _message(event["error"]))
        elif event.get("type") == "transcript.text.delta":
            self._answer.says(event.get("delta") or "", at)
        for choice in event.get("choices") or []:
            self._answer.says((choice.get("delta") or {}).get("content") or "", at)

    def whole(self, data: bytes, at: float) -> None:
        """An answer that is not streamed: its first text is all of it."""
        self._answer.says(_object(data).get("text") or "", at)


def error_message(body: bytes) -> str:
    """What an error response says."""
    try:
        return _message(_object(body).get("error", body.decode(errors="replace")))
    except UnreadableAnswerError:
        return body.decode(errors="replace")


def _message(error: Any) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise UnreadableAnswerError(f"an answer that is not JSON: {data[:80]!r}") from error
    if not isinstance(value, dict):
        raise UnreadableAnswerError(f"an answer that is no JSON object: {data[:80]!r}")
    return value


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise UnreadableAnswerError(f"sound that is not base64: {text[:40]!r}") from error
