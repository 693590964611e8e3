"""Chat answers in OpenAI's shapes: the chunks of a stream, or one body made of the same deltas."""

import base64
from collections.abc import AsyncIterator
from typing import Any

from omni_ray.serve.api import sse
from omni_ray.serve.api.chat_request import ChatCall, Modality
from omni_ray.serve.api.deltas import AudioDelta, Delta, Ended, TextDelta
from omni_ray.serve.api.usage import chat_usage


class ChatShapes:
    """The shapes of one answer.

    Ours beside OpenAI's: a top-level ``modality`` in every chunk. Sound is never kept, so ``expires_at`` is the
    answer's own time. As with OpenAI, ``audio.id`` comes with the first audio delta and ``expires_at`` with the last:
    client helpers add up what is repeated.
    """

    def __init__(self, call: ChatCall, model: str, created: int) -> None:
        self._call = call
        self._text = "text" in call.modalities
        self._audio = "audio" in call.modalities
        self._audio_id: str | None = f"audio-{call.request.request_id}"
        self._head = {"id": f"chatcmpl-{call.request.request_id}", "created": created, "model": model}

    def first(self) -> bytes:
        """The chunk that names the role."""
        return self._chunk("text" if self._text else "audio", {"role": "assistant", "content": self._content("")})

    def pieces(self, delta: Delta) -> list[bytes]:
        """The chunks of one delta; for ``Ended``: the end of the audio, the one finish reason, and usage if asked."""
        if isinstance(delta, TextDelta):
            fields: dict[str, Any] = {"content": delta.text} if self._text else {}
            if self._audio:
                fields["audio"] = self._audio_fields({"transcript": delta.text})
            return [self._chunk("text", fields)]
        if isinstance(delta, AudioDelta):
            encoded = base64.b64encode(delta.data).decode()
            return [self._chunk("audio", {"audio": self._audio_fields({"data": encoded})})]
        assert isinstance(delta, Ended)
        last: Modality = "audio" if delta.last == "audio" else "text"
        pieces = []
        if self._audio:
            pieces.append(self._chunk("audio", {"audio": self._audio_fields({"expires_at": self._head["created"]})}))
        pieces.append(self._chunk(last, {}, delta.reason))
        if self._call.include_usage:
            pieces.append(sse.data({**self._chunk_head(last), "choices": [], "usage": chat_usage(delta.usage)}))
        return pieces

    async def whole(self, deltas: AsyncIterator[Delta]) -> dict[str, Any]:
        """The body of an answer that is not streamed: the collected deltas, one choice."""
        text: list[str] = []
        audio: list[bytes] = []
        end: Ended | None = None
        async for delta in deltas:
            if isinstance(delta, TextDelta):
                text.append(delta.text)
            elif isinstance(delta, AudioDelta):
                audio.append(delta.data)
            elif isinstance(delta, Ended):
                end = delta
        assert end is not None
        words = "".join(text)
        message: dict[str, Any] = {"role": "assistant", "content": self._content(words), "refusal": None}
        if self._audio:
            message["audio"] = {
                "id": self._audio_id,
                "data": base64.b64encode(b"".join(audio)).decode(),
                "transcript": words,
                "expires_at": self._head["created"],
            }
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": end.reason}
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": chat_usage(end.usage)}

    def _content(self, words: str) -> str | None:
        return words if self._text else None

    def _audio_fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        first, self._audio_id = self._audio_id, None
        return fields if first is None else {"id": first, **fields}

    def _chunk_head(self, modality: Modality) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "modality": modality}

    def _chunk(self, modality: Modality, delta: dict[str, Any], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        usage = {"usage": None} if self._call.include_usage else {}
        return sse.data({**self._chunk_head(modality), "choices": [choice], **usage})
