"""Decoding, resampling, PCM and containers (soundfile, soxr); the only place that touches samples' formats.

    request:  decode_base64 -> decode_audio -> float32 [n] mono at the pipeline's rate
    response: float32 [n] or [n, channels] -> StreamResampler -> open_encoder(...).write/finish -> bytes

Samples are float32 in [-1, 1] everywhere outside this module. It does not know requests, stages or HTTP, and it never
blocks on anything but the CPU: the caller keeps it off the event loop.
"""

import base64
import io
import re
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray

from omni_ray.errors import InvalidRequestError, NonFiniteAudioError, PayloadTooLargeError

_DATA_URL = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
# libsndfile reads two dozen more formats, most of them older than its fuzzing. They are never handed to it.
_MAGIC = re.compile(rb"RIF[FX]....WAVE|RF64....WAVE|fLaC|OggS|ID3|\xff[\xe0-\xff]", re.DOTALL)
_CONTAINERS = frozenset({"WAV", "WAVEX", "RF64", "FLAC", "OGG", "MP3"})
_INPUT_RATES_HZ = (4_000, 384_000)
_BASE64_SLICE = 2**20  # characters, a multiple of 4
_BLOCK_SAMPLES = 65_536  # per read, all channels together
_FULL_SCALE = 32_767  # symmetric, so that -1.0 and 1.0 both fit and no sign flips
_UNKNOWN_SIZE = 0xFFFF_FFFF  # WAV sizes of a stream; 0 would read as empty (C26)


# --- input ---


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


# --- samples ---


def check_finite(samples: NDArray[np.float32]) -> None:
    """Raises NonFiniteAudioError if any sample is NaN or infinite; clamped, they would be silence or a loud click."""
    bad = samples.size - int(np.count_nonzero(np.isfinite(samples)))
    if bad:
        raise NonFiniteAudioError(f"the model produced {bad} NaN or infinite samples of {samples.size}")


def pcm16(samples: NDArray[np.float32]) -> tuple[bytes, int]:
    """Converts to 16-bit PCM; exact for every int16 value v in [-32767, 32767] given as v / 32767.

    Args:
        samples: float32 [n] or [n, channels].

    Returns:
        Little-endian interleaved int16, and how many samples lay outside [-1, 1] and were clipped.

    Raises:
        NonFiniteAudioError: before anything is clamped.
    """
    check_finite(samples)
    clipped = int(np.count_nonzero(np.abs(samples) > 1.0))
    return np.rint(np.clip(samples, -1.0, 1.0) * _FULL_SCALE).astype("<i2").tobytes(), clipped


class StreamResampler:
    """Resamples one stream chunk by chunk; the concatenated result does not depend on the chunking.

    Args:
        in_rate: Hz of the samples pushed.
        out_rate: Hz of the samples returned; equal rates pass samples through.
        channels: 1 takes and returns [n], or [n, 1]; more take and return [n, channels].
    """

    def __init__(self, in_rate: int, out_rate: int, channels: int) -> None:
        self._stream = None
        if in_rate != out_rate:
            self._stream = soxr.ResampleStream(in_rate, out_rate, channels, dtype="float32", quality="HQ")

    def push(self, samples: NDArray[np.float32], last: bool = False) -> NDArray[np.float32]:
        """Returns what is ready; the filter holds a tail back until ``last``, after which nothing may be pushed."""
        if self._stream is None:
            return samples
        resampled: NDArray[np.float32] = self._stream.resample_chunk(np.asarray(samples, np.float32), last=last)
        return resampled


# --- output formats ---


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """One ``response_format``.

    Attributes:
        name: as the client writes it.
        content_type: without parameters.
        streamable: pieces may leave while the stream is encoded and nothing sent is ever patched afterwards.
    """

    name: str
    content_type: str
    streamable: bool


# FLAC is not streamable: libsndfile writes its length at the end, into the header; without it soundfile cannot read it.
FORMATS: Mapping[str, AudioFormat] = MappingProxyType(
    {
        "pcm": AudioFormat("pcm", "audio/pcm", streamable=True),
        "wav": AudioFormat("wav", "audio/wav", streamable=True),
        "flac": AudioFormat("flac", "audio/flac", streamable=False),
        "mp3": AudioFormat("mp3", "audio/mpeg", streamable=True),
        "opus": AudioFormat("opus", "audio/ogg", streamable=True),
    }
)


def find_format(name: object, *, streamed: bool, param: str) -> AudioFormat:
    """Looks up a client's format name; exact case, as OpenAI.

    Raises:
        InvalidRequestError: not a string, unknown, or not for this mode; lists what works for it.
    """
    works = ", ".join(known.name for known in FORMATS.values() if known.streamable or not streamed)
    choose = f"{'streamed' if streamed else 'unstreamed'} audio takes one of: {works}"
    found = FORMATS.get(name) if isinstance(name, str) else None
    if found is None:
        raise InvalidRequestError(f"'{param}' {name!r:.40} is not an audio format; {choose}", param)
    if streamed and not found.streamable:
        raise InvalidRequestError(f"'{param}' {found.name!r} cannot be streamed; {choose}", param)
    return found


# --- encoders ---


@dataclass(frozen=True, slots=True)
class _Codec:
    """How libsndfile makes a format. ``rates`` empty: any rate. ``quality`` is its compression level, 0 (best) to 1."""

    container: str
    subtype: str
    max_channels: int
    rates: tuple[int, ...] = ()
    quality: float | None = None
    bitrate_mode: str | None = None


_MP3_RATES_HZ = (8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
_CODECS: Mapping[str, _Codec] = MappingProxyType(
    {
        "flac": _Codec("FLAC", "PCM_16", 8),
        # A constant bit rate, because a reader of a stream (no Xing frame) works out its length from the first frame.
        # 0.5 is 80 kbit/s at 16 to 24 kHz, 160 above.
        "mp3": _Codec("MP3", "MPEG_LAYER_III", 2, _MP3_RATES_HZ, quality=0.5, bitrate_mode="CONSTANT"),
        "opus": _Codec("OGG", "OPUS", 2, (8_000, 12_000, 16_000, 24_000, 48_000)),
    }
)


class Encoder(ABC):
    """Encodes the audio of one request into one continuous stream (C25, C30): write, write, ..., finish, close.

    Every format carries the same 16-bit samples. Without a single frame written, a stream may be empty or unreadable.

    Attributes:
        clipped: samples so far that lay outside [-1, 1].
    """

    def __init__(self, channels: int) -> None:
        self.clipped = 0
        self._channels = channels
        self._closed = False

    def write(self, samples: NDArray[np.float32]) -> bytes:
        """Encodes float32 [n] (one channel) or [n, channels]; returns the bytes that may be sent now, perhaps none.

        Raises:
            NonFiniteAudioError: NaN or infinity; nothing of this call was encoded.
            ValueError: the wrong shape, or the encoder is closed.
        """
        if self._closed:
            raise ValueError("the encoder is closed")
        if samples.shape[1:] != (self._channels,) and (samples.ndim, self._channels) != (1, 1):
            raise ValueError(f"samples of shape {samples.shape} for an encoder of {self._channels} channels")
        pcm, clipped = pcm16(samples)
        self.clipped += clipped
        return self._encode(pcm)

    def finish(self) -> bytes:
        """Returns the rest of the stream and closes the encoder.

        Raises:
            ValueError: the encoder is closed already.
        """
        if self._closed:
            raise ValueError("the encoder is closed")
        rest = self._flush()
        self.close()
        return rest

    def close(self) -> None:
        """Frees the native encoder and drops what was not returned. May be called at any time, any number of times."""
        self._closed = True

    @abstractmethod
    def _encode(self, pcm: bytes) -> bytes: ...

    @abstractmethod
    def _flush(self) -> bytes: ...


class _PcmEncoder(Encoder):
    """s16le without a header; every piece is whole frames (C27)."""

    def _encode(self, pcm: bytes) -> bytes:
        return pcm

    def _flush(self) -> bytes:
        return b""


class _WavEncoder(Encoder):
    """One 44-byte header: before the first piece with unknown sizes, or before the whole with true ones."""

    def __init__(self, channels: int, sample_rate: int, streamed: bool) -> None:
        super().__init__(channels)
        self._sample_rate = sample_rate
        self._streamed = streamed
        self._pending = bytearray(self._header(_UNKNOWN_SIZE) if streamed else b"")

    def _header(self, data_size: int) -> bytes:
        riff_size = min(data_size + 36, _UNKNOWN_SIZE)
        frame_size = 2 * self._channels
        layout = struct.pack(
            "<IHHIIHH", 16, 1, self._channels, self._sample_rate, self._sample_rate * frame_size, frame_size, 16
        )
        size = struct.pack("<I", min(data_size, _UNKNOWN_SIZE))
        return b"RIFF" + struct.pack("<I", riff_size) + b"WAVEfmt " + layout + b"data" + size

    def _encode(self, pcm: bytes) -> bytes:
        self._pending += pcm
        return self._take() if self._streamed else b""

    def _flush(self) -> bytes:
        header = b"" if self._streamed else self._header(len(self._pending))
        return header + self._take()

    def _take(self) -> bytes:
        taken = bytes(self._pending)
        self._pending.clear()
        return taken

    def close(self) -> None:
        super().close()
        self._pending.clear()


class _StreamSink:
    """The file that a streaming libsndfile writes to: what is appended can be taken at once, a patch is dropped.

    LAME starts with an empty frame and, at the end, turns it into the Xing frame that holds the length. That frame is
    gone by then, so it is left out altogether (as libsndfile does itself for pipes); left in, it would be one frame of
    silence.
    """

    def __init__(self) -> None:
        self._position = 0
        self._end = 0
        self._ready = bytearray()

    def write(self, data: bytes) -> int:
        if self._position == self._end:
            is_empty_frame = self._end == 0 and len(data) > 4 and not any(data[4:])  # a header, then zeros
            self._ready += b"" if is_empty_frame else data
            self._end += len(data)
        self._position += len(data)
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._end}[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    def take(self) -> bytes:
        taken = bytes(self._ready)
        self._ready.clear()
        return taken


class _SndfileEncoder(Encoder):
    """flac, mp3, opus: one libsndfile encoder for the whole request."""

    def __init__(self, codec: _Codec, channels: int, sample_rate: int, streamed: bool) -> None:
        super().__init__(channels)
        self._sink = _StreamSink() if streamed else io.BytesIO()
        self._lossless = codec.container == "FLAC"
        self._file = soundfile.SoundFile(
            self._sink,
            "w",
            samplerate=sample_rate,
            channels=channels,
            format=codec.container,
            subtype=codec.subtype,
            compression_level=codec.quality,
            bitrate_mode=codec.bitrate_mode,
        )

    def _encode(self, pcm: bytes) -> bytes:
        frames = np.frombuffer(pcm, "<i2").reshape(-1, self._channels)
        # Floats for the lossy ones: libsndfile 1.2.2 garbles int16 stereo on its way to LAME. Integers for FLAC:
        # libsndfile scales floats by 32768, so that FLAC and PCM would differ.
        self._file.write(frames.astype(np.int16) if self._lossless else frames / np.float32(_FULL_SCALE))
        return self._sink.take() if isinstance(self._sink, _StreamSink) else b""

    def _flush(self) -> bytes:
        self._file.close()
        return self._sink.take() if isinstance(self._sink, _StreamSink) else self._sink.getvalue()

    def close(self) -> None:
        super().close()
        self._file.close()


def open_encoder(format: str, *, sample_rate: int, channels: int, streamed: bool) -> Encoder:
    """Opens the encoder of one request. The caller closes it, also when the request fails.

    Args:
        format: a name in ``FORMATS``.
        sample_rate: Hz of the samples that will be written.
        channels: 1 or more.
        streamed: whether pieces are sent as they come. A whole file carries its true length; a stream cannot.

    Raises:
        InvalidRequestError: unknown or unstreamable format, or a rate or channel count that it cannot carry.
    """
    found = find_format(format, streamed=streamed, param="response_format")
    if found.name == "pcm":
        return _PcmEncoder(channels)
    if found.name == "wav":
        return _WavEncoder(channels, sample_rate, streamed)
    codec = _CODECS[found.name]
    if codec.rates and sample_rate not in codec.rates:
        usable = ", ".join(map(str, codec.rates))
        raise InvalidRequestError(
            f"{found.name} cannot carry {sample_rate} Hz; use a sample rate of {usable} Hz, or wav", "response_format"
        )
    if channels > codec.max_channels:
        raise InvalidRequestError(
            f"{found.name} carries at most {codec.max_channels} channels, not {channels}; use wav", "response_format"
        )
    return _SndfileEncoder(codec, channels, sample_rate, streamed)
