"""What clients send: base64 and sound files, taken for hostile, to float32 samples."""

import base64
import io
import re

import numpy as np
import soundfile
from numpy.typing import NDArray

from omni_ray.audio.samples import StreamResampler
from omni_ray.errors import InvalidRequestError, PayloadTooLargeError

_DATA_URL = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
# libsndfile reads two dozen more formats, most of them older than its fuzzing. They are never handed to it.
_MAGIC = re.compile(rb"RIF[FX]....WAVE|RF64....WAVE|fLaC|OggS|ID3|\xff[\xe0-\xff]", re.DOTALL)
_CONTAINERS = frozenset({"WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3"})
_INPUT_RATES_HZ = (4_000, 384_000)
_BASE64_SLICE = 2**20  # characters, a multiple of 4
_BLOCK_SAMPLES = 65_536  # per read, all channels together


def decode_base64(data: str, *, param: str, max_bytes: int) -> bytes:
    """Decodes base64, raw or wrapped in lines, or a base64 ``data:`` URL with or without a media type.

    Args:
        data: standard alphabet with padding. The media type of a URL is ignored: ``decode_audio`` looks at the bytes.
        param: the request field, for the error.
        max_bytes: limit on the decoded size, checked before anything is decoded. 1 MB = 2**20 bytes in the message.

    Raises:
        PayloadTooLargeError: the decoded bytes would exceed ``max_bytes``.
        InvalidRequestError: not such base64, or empty.
    """
    invalid = InvalidRequestError(
        f"'{param}' is not valid base64: send the standard alphabet with padding, or a data:...;base64, URL", param
    )
    start = 0
    if data[:5].lower() == "data:":
        prefix = _DATA_URL.match(data)
        if prefix is None:
            raise invalid
        start = prefix.end()
    characters = len(data) - start - data.count("\n", start) - data.count("\r", start)
    size = characters * 3 // 4 - data.count("=", max(start, len(data) - 4))
    if size > max_bytes:
        raise PayloadTooLargeError(f"'{param}' exceeds the limit of {max_bytes / 2**20:.4g} MB", param)
    if characters % 4:  # the decoder lets a surplus "=" pass
        raise invalid
    text = data[start:].replace("\n", "").replace("\r", "")
    if text.find("=", 0, -2) >= 0:
        raise invalid
    try:  # in slices: the decoder lets no other thread run, and 50 MB take it 0.2 s (C55)
        slices = (text[at : at + _BASE64_SLICE] for at in range(0, len(text), _BASE64_SLICE))
        decoded = b"".join([base64.b64decode(piece, validate=True) for piece in slices])
    except ValueError as error:  # also binascii.Error, and non-ASCII text
        raise invalid from error
    if not decoded:
        raise invalid
    return decoded


class _ForwardFile(soundfile.SoundFile):  # type: ignore[misc]
    """A SoundFile that reads only forwards.

    A seekable SoundFile seeks after every block. mpg123 loses its bit reservoir by that (each border of an MP3 was off
    by up to half of full scale), and a FLAC of unknown length fails at its end.
    """

    def seekable(self) -> bool:
        return False


class _EndlessFile(io.BytesIO):
    """Bytes that claim 2**40 more of them, so that libsndfile's guess of an MP3's length cannot end the reading."""

    _at_end = False

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at_end = whence == io.SEEK_END
        return super().seek(offset, whence)

    def tell(self) -> int:
        return super().tell() + (2**40 if self._at_end else 0)


def decode_audio(data: bytes, *, param: str, sample_rate: int, max_seconds: float) -> NDArray[np.float32]:
    """Decodes one clip to mono. The content decides the format; whatever the client declared is ignored (C54).

    Work and memory are bounded by ``max_seconds``, not by the header: a header may lie, and a small FLAC may hold
    hours of silence.

    Args:
        data: wav, flac, ogg (vorbis or opus) or mp3; any channel count (averaged).
        param: the request field, for the errors.
        sample_rate: Hz of the result.
        max_seconds: longest clip that is accepted.

    Returns:
        float32 [n] in [-1, 1], n = seconds * ``sample_rate`` rounded.

    Raises:
        InvalidRequestError: not audio, damaged, empty, longer than ``max_seconds``, an unusable rate, NaN or infinity.
    """
    if not _MAGIC.match(data):
        raise _undecodable(param)
    source = io.BytesIO(data)
    container, samples = _read_mono(source, param, sample_rate, max_seconds)
    # An MP3 without a Xing frame has no length; libsndfile guesses one from the first frames and stops there, which
    # cuts a variable bit rate short without an error. Bytes left over show it.
    if container == "MP3" and source.tell() < len(data):
        _, samples = _read_mono(_EndlessFile(data), param, sample_rate, max_seconds)
    if not samples.size:
        raise InvalidRequestError(f"'{param}' holds no audio samples; send a clip that is not empty", param)
    return samples


def _read_mono(source: io.BytesIO, param: str, sample_rate: int, max_seconds: float) -> tuple[str, NDArray[np.float32]]:
    parts: list[NDArray[np.float32]] = []
    try:
        with _ForwardFile(source) as file:
            if file.format not in _CONTAINERS:
                raise _undecodable(param)
            low, high = _INPUT_RATES_HZ
            if not low <= file.samplerate <= high:
                raise InvalidRequestError(
                    f"'{param}' has a sample rate of {file.samplerate} Hz; send {low} to {high} Hz", param
                )
            resampler = StreamResampler(file.samplerate, sample_rate, 1)
            block = np.empty((max(1, _BLOCK_SAMPLES // file.channels), file.channels), np.float32)
            frames = 0
            while len(read := file.read(out=block)):
                frames += len(read)
                if frames > max_seconds * file.samplerate:
                    raise InvalidRequestError(
                        f"'{param}' is longer than the limit of {max_seconds:g} seconds; send a shorter clip", param
                    )
                if not np.isfinite(read).all():
                    raise InvalidRequestError(
                        f"'{param}' holds NaN or infinite samples; send finite samples in [-1, 1]", param
                    )
                # Clipped before the mean, which could overflow, and again after the resampler, which overshoots.
                parts.append(resampler.push(np.clip(read, -1.0, 1.0).mean(axis=1, dtype=np.float32)))
            parts.append(resampler.push(np.empty(0, np.float32), last=True))
            return file.format, np.clip(np.concatenate(parts), -1.0, 1.0)
    except soundfile.LibsndfileError as error:
        raise _undecodable(param) from error


def _undecodable(param: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"'{param}' is not decodable audio, or is damaged; send wav, flac, ogg (vorbis or opus) or mp3", param
    )
