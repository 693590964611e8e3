"""Decoding videos (PyAV, an optional package); the only place that touches video formats. Knows no stages or HTTP.

Clients are hostile: the container is told by its first bytes and its demuxer named, so that no playlist is followed;
only common codecs may run; and what is decoded is bounded by what is found, whatever the header says.
"""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from omni_ray.audio import StreamResampler
from omni_ray.errors import InvalidRequestError

VIDEO_CODECS: Final = ("h264", "hevc", "vp8", "vp9", "libdav1d", "av1", "mpeg4")
SOUND_CODECS: Final = ("aac", "mp3float", "mp3", "opus", "vorbis", "flac", "pcm_s16le", "pcm_s16be", "pcm_f32le")
"""Decoders of ffmpeg that may run; it has hundreds."""

MOST_FRAME_PIXELS: Final = 4096 * 2304
"""Of one frame: decoders keep up to 17 of them."""
MOST_FRAMES_PER_SECOND: Final = 120
"""More of them are refused: each is decoded, though few are kept."""
MOST_PACKETS_PER_SECOND: Final = 1000
"""Of all streams, unread ones too."""
SLACK_S: Final = 0.5
"""How much earlier than its header says a video may end before it counts as cut short."""

Choice = Callable[[int, float], Sequence[int]]
"""(frames there are, frames per second) -> ascending indices of those to keep."""


def decode_video(data: bytes, *, param: str, choose: Choice, max_seconds: float, max_pixels: int) -> NDArray[np.uint8]:
    """Decodes the chosen frames of a video. The content decides the format; what the client declared is ignored (C54).

    The camera's rotation is applied. CPU work without the GIL, so the caller keeps it off the event loop.

    Args:
        data: mp4, mov, webm or mkv.
        param: the request field, for the errors.
        choose: which frames; asked again if the file turns out to hold other than as many frames as packets.
        max_seconds: longest video that is accepted.
        max_pixels: of all chosen frames together; checked by the header, before anything is decoded.

    Returns:
        uint8 RGB [frames, height, width, 3].

    Raises:
        InvalidRequestError: PyAV is missing, not a video, damaged, cut short, no frames, no frame rate, too long or
            too large.
    """
    with _opened(data, param) as container:
        count, rate = _frames(container, param, max_seconds)
    while True:
        wanted = choose(count, rate)
        with _opened(data, param) as container:
            stream = container.streams.video[0]
            _check_size(stream.width, stream.height, len(wanted), param, max_pixels)
            kept, found = _decoded(container, wanted, param, max_pixels)
        if not found:
            raise InvalidRequestError(f"'{param}' holds no frames; send a video that is not empty", param)
        if found == count:
            return kept
        count = found  # some packets hold no picture, which only decoding shows


def decode_sound(data: bytes, *, param: str, sample_rate: int, max_seconds: float) -> NDArray[np.float32]:
    """Decodes the first sound track of a video to mono.

    Args:
        data: see ``decode_video``.
        param: the request field, for the errors.
        sample_rate: Hz of the result.
        max_seconds: longest track that is accepted.

    Returns:
        float32 [n] in [-1, 1].

    Raises:
        InvalidRequestError: as ``decode_video``; or there is no sound.
    """
    silent = InvalidRequestError(f"'{param}' has no sound, but use_audio_in_video asks for it; leave that out", param)
    with _opened(data, param) as container:
        if not container.streams.audio:
            raise silent
        stream = container.streams.audio[0]
        _check_codec(stream, SOUND_CODECS, param)
        rate = stream.rate
        parts, samples, resampler = [], 0, StreamResampler(rate, sample_rate, 1)
        for heard in _heard(container, stream):
            samples += heard.shape[1]
            if samples > max_seconds * rate:
                raise _too_long(param, max_seconds)
            if not np.isfinite(heard).all():
                raise InvalidRequestError(f"'{param}' holds NaN or infinite samples; send finite ones", param)
            parts.append(resampler.push(np.clip(heard, -1.0, 1.0).mean(axis=0, dtype=np.float32)))
        if not samples:
            raise silent
        parts.append(resampler.push(np.empty(0, np.float32), last=True))
        return np.clip(np.concatenate(parts), -1.0, 1.0)


@contextmanager
def _opened(data: bytes, param: str) -> Iterator[Any]:
    """The container, open; whatever ffmpeg raises inside becomes an error that names ``param``."""
    if find_spec("av") is None:
        raise InvalidRequestError(f"'{param}': this server cannot read videos; install omni-ray[video] there", param)
    import av

    damaged = InvalidRequestError(
        f"'{param}' is not a decodable video, or is damaged; send mp4, mov, webm or mkv", param
    )
    demuxer = _demuxer(data)
    if demuxer is None:
        raise damaged
    # The options reach the probing of streams too, which decodes a little before anybody could look at the header.
    options = {
        "codec_whitelist": ",".join((*VIDEO_CODECS, *SOUND_CODECS)),
        "max_pixels": str(MOST_FRAME_PIXELS),
        "threads": "1",
    }
    try:
        with av.open(io.BytesIO(data), format=demuxer, options=options, metadata_errors="replace") as container:
            yield container
    except InvalidRequestError:
        raise
    except Exception as error:  # a damaged file may lead ffmpeg to report anything
        raise damaged from error


def _demuxer(data: bytes) -> str | None:
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "mov"
    return "matroska" if data[:4] == b"\x1a\x45\xdf\xa3" else None


def _frames(container: Any, param: str, max_seconds: float) -> tuple[int, float]:
    """How many frames there are by the packets, and how many a second."""
    if not container.streams.video:
        raise InvalidRequestError(f"'{param}' holds no video stream", param)
    stream = container.streams.video[0]
    _check_codec(stream, VIDEO_CODECS, param)
    packets, count, first, last, reach = 0, 0, None, 0.0, 0.0
    for packet in container.demux():
        at = packet.dts if packet.pts is None else packet.pts
        if not packet.size or at is None:
            continue
        packets += 1
        start = float(at * packet.time_base)
        reach = max(reach, start + float((packet.duration or 0) * packet.time_base))
        if packet.stream_index == stream.index and not packet.is_discard:
            count += 1
            first, last = start if first is None else min(first, start), max(last, start)
        if (
            reach - (first or 0.0) > max_seconds
            or count > max_seconds * MOST_FRAMES_PER_SECOND
            or packets > max_seconds * MOST_PACKETS_PER_SECOND
        ):
            raise _too_long(param, max_seconds)
    if first is None:
        raise InvalidRequestError(f"'{param}' holds no frames; send a video that is not empty", param)
    if (container.duration or 0) / 1e6 - reach > SLACK_S:
        raise InvalidRequestError(f"'{param}' is cut short: it ends before the length that its header says", param)
    rate = float(stream.average_rate or 0)
    if not 0 < rate <= MOST_FRAMES_PER_SECOND:
        rate = 1.0 if count == 1 else (count - 1) / (last - first) if last > first else 0.0
    if not rate > 0:
        raise InvalidRequestError(f"'{param}' has no frame rate; send a video whose frames have times", param)
    return count, rate


def _decoded(container: Any, wanted: Sequence[int], param: str, max_pixels: int) -> tuple[NDArray[np.uint8], int]:
    """The wanted frames, and how many frames there are in all."""
    places = {index: place for place, index in enumerate(wanted)}
    kept: NDArray[np.uint8] | None = None
    found = 0
    for frame in container.decode(container.streams.video[0]):
        if found in places:
            pixels = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90) % 4)
            if kept is None:
                _check_size(frame.width, frame.height, len(wanted), param, max_pixels)
                kept = np.empty((len(wanted), *pixels.shape), np.uint8)
            if pixels.shape != kept.shape[1:]:
                raise InvalidRequestError(f"'{param}' changes its size; send a video of one size", param)
            kept[places[found]] = pixels
        found += 1
    return np.empty((0, 0, 0, 3), np.uint8) if kept is None else kept, found


def _heard(container: Any, stream: Any) -> Iterator[NDArray[Any]]:
    """Blocks of the track, float32 [channels, n]."""
    import av

    resampler = av.AudioResampler(format="fltp")
    for frame in container.decode(stream):
        for part in resampler.resample(frame):
            yield part.to_ndarray()
    for part in resampler.resample(None):
        yield part.to_ndarray()


def _check_codec(stream: Any, known: Sequence[str], param: str) -> None:
    name = None if stream.codec_context is None else stream.codec_context.name
    if name not in known:
        raise InvalidRequestError(f"'{param}': codec {name} is not read here; known are {', '.join(known)}", param)


def _check_size(width: int, height: int, frames: int, param: str, max_pixels: int) -> None:
    if width * height > MOST_FRAME_PIXELS:
        raise InvalidRequestError(f"'{param}': frames of {width} x {height} are too large; send a smaller video", param)
    if width * height * frames > max_pixels:
        raise InvalidRequestError(
            f"'{param}': the {frames} frames taken of it have more than the {max_pixels / 1e6:.4g} megapixels allowed; "
            "send a shorter or smaller video",
            param,
        )


def _too_long(param: str, max_seconds: float) -> InvalidRequestError:
    return InvalidRequestError(
        f"'{param}' is longer than the limit of {max_seconds:g} seconds, or has more than {MOST_FRAMES_PER_SECOND} "
        "frames a second; send a shorter video",
        param,
    )
