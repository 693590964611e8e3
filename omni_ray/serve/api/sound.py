"""The sound of one answer: audio chunks in order -> one resampler, one encoder -> bytes that may be sent."""

import numpy as np
from numpy.typing import NDArray

from omni_ray.audio import Encoder, StreamResampler, check_finite, open_encoder
from omni_ray.engine.types import AudioChunk
from omni_ray.errors import InvalidRequestError, StageFailedError, TruncatedError
from omni_ray.serve.api.request_log import RequestInfo
from omni_ray.serve.api.threads import in_thread

SILENCE_S = 0.1  # what a player gets where nothing could be spoken
_DEFAULT_RATE_HZ = 24_000


class Sound:
    """Encodes what one request speaks. Its owner closes it, in the task that wrote to it (C12).

    Args:
        format: a name of ``omni_ray.audio.FORMATS``.
        streamed: whether pieces leave while more is written.
        sample_rate: Hz to send, or None for the model's own (or the nearest the format can carry).
        mono: mix channels down to one.
        max_bytes: most bytes of the whole answer.
        info: counts seconds and clipped samples.

    Attributes:
        sample_rate, channels: what is sent; known after the first ``write`` or ``finish``.
    """

    def __init__(
        self, format: str, *, streamed: bool, sample_rate: int | None, mono: bool, max_bytes: int, info: RequestInfo
    ) -> None:
        self.sample_rate = sample_rate or _DEFAULT_RATE_HZ
        self.channels = 1
        self._format = format
        self._streamed = streamed
        self._wanted_rate = sample_rate
        self._mono = mono
        self._left_bytes = max_bytes
        self._info = info
        self._position = 0
        self._source: tuple[int, int] | None = None  # rate and channels of the model's chunks
        self._resampler: StreamResampler | None = None
        self._encoder: Encoder | None = None

    async def write(self, chunk: AudioChunk) -> bytes:
        """Bytes that may be sent now, whole frames, perhaps none.

        Raises:
            StageFailedError: the chunk does not follow the last one, or is of another rate or shape.
            NonFiniteAudioError: NaN or infinity, before anything is clamped (C28).
            TruncatedError: the answer has more than ``max_bytes``.
        """
        samples = chunk.samples
        source = (chunk.sample_rate, 1 if samples.ndim == 1 else samples.shape[1])
        if self._source is None:
            self._open(source)
        elif source != self._source:
            raise StageFailedError(f"the audio changed from (Hz, channels) {self._source} to {source}")
        if chunk.position != self._position:
            raise StageFailedError(f"audio of position {chunk.position} came where {self._position} was due")
        self._position += len(samples)
        self._info.audio_seconds += len(samples) / chunk.sample_rate
        if self._mono and samples.ndim == 2:
            samples = samples.mean(axis=1, dtype=np.float32)
        return await self._encode(samples, last=False)

    async def finish(self) -> bytes:
        """The rest of the stream. An answer without a sample becomes ``SILENCE_S`` of silence, a file that opens."""
        if self._source is None:
            self._open((self.sample_rate, 1))
        rate, channels = self._source or (self.sample_rate, 1)
        shape: tuple[int, ...] = (0,) if self._position else (round(SILENCE_S * rate),)
        if channels > 1 and not self._mono:
            shape = (*shape, channels)
        rest = await self._encode(np.zeros(shape, np.float32), last=True)
        self._info.clipped += self._encoder.clipped if self._encoder else 0
        return rest

    def close(self) -> None:
        """Frees the encoder."""
        encoder, self._encoder = self._encoder, None
        if encoder is not None:
            encoder.close()

    def _open(self, source: tuple[int, int]) -> None:
        self._source = source
        rate, channels = source
        self.channels = 1 if self._mono else channels
        self.sample_rate = self._wanted_rate or rate
        try:
            self._encoder = self._open_encoder()
        except InvalidRequestError:
            if self._wanted_rate is not None:
                raise
            self.sample_rate = 48_000 if rate > _DEFAULT_RATE_HZ else _DEFAULT_RATE_HZ
            self._encoder = self._open_encoder()
        if self.sample_rate != rate:
            self._resampler = StreamResampler(rate, self.sample_rate, self.channels)

    def _open_encoder(self) -> Encoder:
        return open_encoder(self._format, sample_rate=self.sample_rate, channels=self.channels, streamed=self._streamed)

    async def _encode(self, samples: NDArray[np.float32], last: bool) -> bytes:
        if self._resampler is None and self._format in ("pcm", "wav"):
            return self._encode_here(samples, last)
        return await in_thread(self._encode_here, samples, last)

    def _encode_here(self, samples: NDArray[np.float32], last: bool) -> bytes:
        assert self._encoder is not None
        check_finite(samples)
        if self._resampler is not None:
            samples = self._resampler.push(samples, last)
        written = self._encoder.write(samples)
        if last:
            written += self._encoder.finish()
        self._left_bytes -= len(written)
        if self._left_bytes < 0:
            raise TruncatedError("the sound has more bytes than one answer may have here (ingress.max_answer_mb)")
        return written
