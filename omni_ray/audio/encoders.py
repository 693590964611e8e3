"""From samples to one continuous stream of bytes, for each format."""

import io
import struct
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import soundfile
from numpy.typing import NDArray

from omni_ray.audio.formats import find_format
from omni_ray.audio.samples import FULL_SCALE, pcm16
from omni_ray.errors import InvalidRequestError

_UNKNOWN_SIZE = 0xFFFF_FFFF  # WAV sizes of a stream; 0 would read as empty (C26)


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
        self._file.write(frames.astype(np.int16) if self._lossless else frames / np.float32(FULL_SCALE))
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
