"""Media that came with a request: base64, bytes or a URL -> decoded clips, off the event loop and bounded."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, ParamSpec, TypeVar

from omni_ray.audio import decode_audio, decode_base64
from omni_ray.engine.types import AudioClip, Clip, ImageClip, VideoClip
from omni_ray.errors import InvalidRequestError
from omni_ray.image import decode_image
from omni_ray.serve.api.incoming import MB, Body
from omni_ray.serve.api.service import Service
from omni_ray.serve.api.threads import in_thread
from omni_ray.serve.dispatcher import Dispatcher
from omni_ray.video import decode_sound, decode_video

P = ParamSpec("P")
C = TypeVar("C", AudioClip, ImageClip, VideoClip)
Kind = Literal["audio", "image", "video"]
_TOTAL_SECONDS = 600.0  # of all clips together, where one clip may be shorter; bounds memory, not the models


@dataclass(frozen=True, slots=True)
class MediaUrl:
    """Where a clip is to be fetched from."""

    url: str


@dataclass(frozen=True, slots=True)
class EncodedClip:
    """A sound, picture or video as the client sent it: base64, bytes, or where it lies.

    ``param`` is the field it came in.
    """

    param: str
    data: str | bytes | MediaUrl
    kind: Kind = "audio"


async def decode_clips(
    service: Service, body: Body, encoded: Sequence[EncodedClip], audio_in_video: bool = False
) -> tuple[Clip, ...]:
    """Fetches and decodes clips in order; their index is their place. What is fetched counts as part of ``body``.

    Args:
        service: knows the limits, and fetches.
        body: see above.
        encoded: as the client sent them.
        audio_in_video: give every video's sound too, as a clip of the same index behind it.

    Raises:
        SaturatedError: the media of all requests together are too large.
        InvalidRequestError: not base64, not what its kind says, empty, not to be had from its URL, or too long or
            large alone or together.
        PayloadTooLargeError: one clip is over ``max_audio_mb``.
    """
    dispatcher = service.dispatcher
    rate = dispatcher.pipeline.input_audio_sample_rate
    total_s = max(_TOTAL_SECONDS, dispatcher.max_input_audio_seconds)
    clips: list[Clip] = []
    seconds, pixels = 0.0, int(dispatcher.config.max_image_mpixels * 1e6)
    video_pixels = int(dispatcher.config.max_video_mpixels * 1e6)
    for index, clip in enumerate([await _fetched(service, body, clip) for clip in encoded]):
        if clip.kind == "image":
            picture = await _decoded(service, body, _decode_image, dispatcher, clip, index, pixels)
            pixels -= picture.pixels.shape[0] * picture.pixels.shape[1]
            clips.append(picture)
            continue
        if clip.kind == "video":
            video = await _decoded(service, body, _decode_video, dispatcher, clip, index, video_pixels)
            video_pixels -= video.frames.size // 3
            clips.append(video)
            if not audio_in_video:
                continue
        decoded = await _decoded(service, body, _decode_audio, dispatcher, clip, index, rate)
        seconds += len(decoded.samples) / rate
        if seconds > total_s:
            raise InvalidRequestError(f"{clip.param}: all clips together are longer than {total_s:g} s", clip.param)
        clips.append(decoded)
    return tuple(clips)


async def _decoded(service: Service, body: Body, decode: Callable[P, C], *args: P.args, **kwargs: P.kwargs) -> C:
    """What ``decode`` gives, in a thread; its bytes count until the request is over."""
    async with service.bodies.decoding:
        clip = await in_thread(decode, *args, **kwargs)
    body.info.held.enter_context(service.bodies.keep_media(_nbytes(clip)))
    return clip


async def _fetched(service: Service, body: Body, clip: EncodedClip) -> EncodedClip:
    if not isinstance(clip.data, MediaUrl):
        return clip
    most = int(service.dispatcher.config.max_audio_mb * MB)
    data = await service.fetcher.fetch(clip.data.url, param=clip.param, max_bytes=most, count=body.add)
    return replace(clip, data=data)


def _decode_audio(dispatcher: Dispatcher, clip: EncodedClip, index: int, rate: int) -> AudioClip:
    data = _bytes(dispatcher, clip)
    decode = decode_sound if clip.kind == "video" else decode_audio
    samples = decode(data, param=clip.param, sample_rate=rate, max_seconds=dispatcher.max_input_audio_seconds)
    return AudioClip(index, samples, rate)


def _decode_image(dispatcher: Dispatcher, clip: EncodedClip, index: int, pixels: int) -> ImageClip:
    return ImageClip(index, decode_image(_bytes(dispatcher, clip), param=clip.param, max_pixels=pixels))


def _decode_video(dispatcher: Dispatcher, clip: EncodedClip, index: int, pixels: int) -> VideoClip:
    sampling = dispatcher.pipeline.input_video
    frames = decode_video(
        _bytes(dispatcher, clip),
        param=clip.param,
        choose=sampling.indices,
        max_seconds=dispatcher.config.max_video_seconds,
        max_pixels=pixels,
    )
    return VideoClip(index, frames, sampling.fps)


def _bytes(dispatcher: Dispatcher, clip: EncodedClip) -> bytes:
    if isinstance(clip.data, bytes):
        return clip.data
    assert isinstance(clip.data, str)
    return decode_base64(clip.data, param=clip.param, max_bytes=int(dispatcher.config.max_audio_mb * MB))


def _nbytes(clip: Clip) -> int:
    match clip:
        case AudioClip(samples=array) | ImageClip(pixels=array) | VideoClip(frames=array):
            return array.nbytes
