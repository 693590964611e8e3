"""What ``ramp`` must answer, computed in one piece. Imported by its stages and by the tests that compare bytes."""

import zlib

import numpy as np
from numpy.typing import NDArray

from omni_ray.engine.types import Request, TextPart
from omni_ray.errors import InvalidRequestError
from omni_ray.models.ramp.options import RequestFaults

SAMPLES_PER_FRAME = 1920


def request_text(request: Request) -> str:
    """The text a request is about: the speech input, or the last user message's text.

    Raises:
        InvalidRequestError: the chat holds no user message.
    """
    if request.speech_text is not None:
        return request.speech_text
    last = next((m for m in reversed(request.messages) if m.role == "user"), None)
    if last is None:
        raise InvalidRequestError("ramp answers the last user message, and there is none", "messages")
    return " ".join(part.text for part in last.content if isinstance(part, TextPart))


def tag_of_text(text: str, voice: str) -> int:
    """crc32 of text and voice: the number every sample of the request carries."""
    return zlib.crc32(f"{text}{voice}".encode())


def tag_of(request: Request) -> int:
    """The request's tag; with ``noise`` the seed is mixed in."""
    voice = request.voice or "a"
    faults = request.extras.get("ramp")
    noisy = isinstance(faults, RequestFaults) and faults.noise
    return tag_of_text(request_text(request), f"{voice}{request.seed}" if noisy else voice)


def samples(tag: int, start: int, stop: int) -> NDArray[np.int16]:
    """Samples ``start`` to ``stop`` of the request with ``tag``: a ramp modulo 20011, int16."""
    k = np.arange(start, stop, dtype=np.int64)
    return ((tag * 7919 + k) % 20011 - 10005).astype(np.int16)


def pcm(text: str, voice: str = "a", frames_per_token: int = 3, deficit: int = 0) -> bytes:
    """The whole answer as little-endian s16 mono."""
    frames = len(text.split()) * frames_per_token
    return samples(tag_of_text(text, voice), 0, frames * SAMPLES_PER_FRAME - deficit).astype("<i2").tobytes()


def decode_window(frames: NDArray[np.int64], deficit: int) -> NDArray[np.float32]:
    """Code frames [n, 2], ``(tag, frame number)`` each, to mono samples float32 [n * SAMPLES_PER_FRAME - deficit]."""
    pieces = [samples(int(tag), n * SAMPLES_PER_FRAME, (n + 1) * SAMPLES_PER_FRAME) for tag, n in frames.tolist()]
    mono = np.concatenate(pieces)[: len(frames) * SAMPLES_PER_FRAME - deficit]
    return mono.astype(np.float32) / np.float32(32767)
