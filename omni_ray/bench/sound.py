"""How long the sound in a stream's bytes is: raw s16le, one WAV that goes on, or a WAV file in every piece."""

from omni_ray.errors import OmniRayError

_RIFF = b"RIFF"


class UnreadableAnswerError(OmniRayError):
    """The server's answer is not what its type says."""


class SoundMeter:
    """Counts the samples of one stream.

    omni_ray streams raw s16le, or one WAV header and then raw samples; vLLM-Omni sends a complete WAV file in every
    chat chunk. All of these are told apart by the bytes.

    Args:
        sample_rate: Hz of raw samples, where no header says it.
        channels: of raw samples.
    """

    def __init__(self, sample_rate: int, channels: int = 1) -> None:
        self.sample_rate = sample_rate
        self.channels = channels
        self._frame_bytes = 2 * channels
        self._held = b""
        self._in_header = False
        self._begun = False

    def push(self, data: bytes, is_message: bool) -> float:
        """Seconds of sound in ``data``.

        Args:
            data: the next bytes; a header or a sample may be cut between two calls.
            is_message: these bytes were framed by the server, so a WAV file may begin here; else only at the start.

        Raises:
            UnreadableAnswerError: a WAV header that is not 16 bit PCM.
        """
        if is_message and data.startswith(_RIFF):
            self._held = b""  # half a sample before a new file is lost sound, at most one frame
            self._in_header = True
        elif not self._begun and not self._in_header:
            start = (self._held + data)[:4]
            if len(start) < 4 and _RIFF.startswith(start):
                self._held += data
                return 0.0
            self._in_header = start == _RIFF
        self._held += data
        if self._in_header and not self._take_header():
            return 0.0
        self._begun = True
        frames = len(self._held) // self._frame_bytes
        self._held = self._held[frames * self._frame_bytes :]
        return frames / self.sample_rate

    def _take_header(self) -> bool:
        """Drop everything up to the samples; False if more bytes are needed."""
        data, at = self._held, 12
        while len(data) >= at + 8:
            name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
            if name == b"data":
                self._held = data[at + 8 :]
                self._in_header = False
                return True
            if len(data) < at + 8 + size:
                return False
            if name == b"fmt ":
                self._read_format(data[at + 8 : at + 8 + size])
            at += 8 + size + size % 2
        return False

    def _read_format(self, chunk: bytes) -> None:
        if len(chunk) < 16 or int.from_bytes(chunk[14:16], "little") != 16:
            raise UnreadableAnswerError("the answer's WAV is not 16 bit PCM, which is all that bench measures")
        self.channels = int.from_bytes(chunk[2:4], "little")
        self.sample_rate = int.from_bytes(chunk[4:8], "little")
        if not self.channels or not self.sample_rate:
            raise UnreadableAnswerError("the answer's WAV header says no channels or no sample rate")
        self._frame_bytes = 2 * self.channels
