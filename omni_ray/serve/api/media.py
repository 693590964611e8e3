"""Audio that came with a request: base64 or bytes -> clips at the pipeline's rate, off the event loop and bounded."""

from collections.abc import Sequence
from dataclasses import dataclass

from omni_ray.audio import decode_audio, decode_base64
from omni_ray.engine.types import AudioClip
from omni_ray.errors import InvalidRequestError
from omni_ray.serve.api.body import MB
from omni_ray.serve.api.threads import in_thread
from omni_ray.serve.dispatcher import Dispatcher

_TOTAL_SECONDS = 600.0  # of all clips together, where one clip may be shorter; bounds memory, not the models


@dataclass(frozen=True, slots=True)
class EncodedClip:
    """A clip as the client sent it; ``param`` is the field it came in."""

    param: str
    data: str | bytes


async def decode_clips(dispatcher: Dispatcher, encoded: Sequence[EncodedClip]) -> tuple[AudioClip, ...]:
    """Decodes clips in order; their index is their place.

    Raises:
        InvalidRequestError: not base64, not audio, empty, too long alone or together.
        PayloadTooLargeError: one clip is over ``max_audio_mb``.
    """
    rate = dispatcher.pipeline.input_audio_sample_rate
    total_s = max(_TOTAL_SECONDS, dispatcher.max_input_audio_seconds)
    clips: list[AudioClip] = []
    seconds = 0.0
    for index, clip in enumerate(encoded):
        decoded = await in_thread(_decode, dispatcher, clip, index, rate)
        seconds += len(decoded.samples) / rate
        if seconds > total_s:
            raise InvalidRequestError(f"{clip.param}: all clips together are longer than {total_s:g} s", clip.param)
        clips.append(decoded)
    return tuple(clips)


def _decode(dispatcher: Dispatcher, clip: EncodedClip, index: int, rate: int) -> AudioClip:
    data = clip.data
    if isinstance(data, str):
        data = decode_base64(data, param=clip.param, max_bytes=int(dispatcher.config.max_audio_mb * MB))
    samples = decode_audio(data, param=clip.param, sample_rate=rate, max_seconds=dispatcher.max_input_audio_seconds)
    return AudioClip(index, samples, rate)
