"""Media that came with a request: base64, bytes or a URL -> decoded clips, off the event loop and bounded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from omni_ray.audio import decode_audio, decode_base64
from omni_ray.engine.types import AudioClip, Clip, ImageClip
from omni_ray.errors import InvalidRequestError
from omni_ray.image import decode_image
from omni_ray.serve.api.incoming import MB, Body
from omni_ray.serve.api.service import Service
from omni_ray.serve.api.threads import in_thread
from omni_ray.serve.dispatcher import Dispatcher

_TOTAL_SECONDS = 600.0  # of all clips together, where one clip may be shorter; bounds memory, not the models


@dataclass(frozen=True, slots=True)
class MediaUrl:
    """Where a clip is to be fetched from."""

    url: str


@dataclass(frozen=True, slots=True)
class EncodedClip:
    """A sound or picture as the client sent it: base64, bytes, or where it lies; ``param`` is the field it came in."""

    param: str
    data: str | bytes | MediaUrl
    kind: Literal["audio", "image"] = "audio"


async def decode_clips(service: Service, body: Body, encoded: Sequence[EncodedClip]) -> tuple[Clip, ...]:
    """Fetches and decodes clips in order; their index is their place. What is fetched counts as part of ``body``.

    Raises:
        InvalidRequestError: not base64, not what its kind says, empty, not to be had from its URL, or too long or
            large alone or together.
        PayloadTooLargeError: one clip is over ``max_audio_mb``.
    """
    dispatcher = service.dispatcher
    rate = dispatcher.pipeline.input_audio_sample_rate
    total_s = max(_TOTAL_SECONDS, dispatcher.max_input_audio_seconds)
    clips: list[Clip] = []
    seconds, pixels = 0.0, int(dispatcher.config.max_image_mpixels * 1e6)
    for index, clip in enumerate([await _fetched(service, body, clip) for clip in encoded]):
        if clip.kind == "image":
            picture = await in_thread(_decode_image, dispatcher, clip, index, pixels)
            pixels -= picture.pixels.shape[0] * picture.pixels.shape[1]
            clips.append(picture)
            continue
        decoded = await in_thread(_decode_audio, dispatcher, clip, index, rate)
        seconds += len(decoded.samples) / rate
        if seconds > total_s:
            raise InvalidRequestError(f"{clip.param}: all clips together are longer than {total_s:g} s", clip.param)
        clips.append(decoded)
    return tuple(clips)


async def _fetched(service: Service, body: Body, clip: EncodedClip) -> EncodedClip:
    if not isinstance(clip.data, MediaUrl):
        return clip
    most = int(service.dispatcher.config.max_audio_mb * MB)
    data = await service.fetcher.fetch(clip.data.url, param=clip.param, max_bytes=most, count=body.add)
    return replace(clip, data=data)


def _decode_audio(dispatcher: Dispatcher, clip: EncodedClip, index: int, rate: int) -> AudioClip:
    data = _bytes(dispatcher, clip)
    samples = decode_audio(data, param=clip.param, sample_rate=rate, max_seconds=dispatcher.max_input_audio_seconds)
    return AudioClip(index, samples, rate)


def _decode_image(dispatcher: Dispatcher, clip: EncodedClip, index: int, pixels: int) -> ImageClip:
    return ImageClip(index, decode_image(_bytes(dispatcher, clip), param=clip.param, max_pixels=pixels))


def _bytes(dispatcher: Dispatcher, clip: EncodedClip) -> bytes:
    if isinstance(clip.data, bytes):
        return clip.data
    assert isinstance(clip.data, str)
    return decode_base64(clip.data, param=clip.param, max_bytes=int(dispatcher.config.max_audio_mb * MB))
