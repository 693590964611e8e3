"""One request as its client saw it."""

from dataclasses import dataclass, field

from omni_ray.playback import Playback

ERROR_KINDS = {
    "connect": "no connection to the server",
    "timeout": "nothing came for --timeout seconds",
    "http_<status>": "an HTTP status other than 200, for example http_503 when the server is full",
    "stream_error": "an error event inside a stream that had begun",
    "cut": "the connection broke before the answer's end",
    "unreadable": "an answer that is not what its type says",
    "no_audio": "an answer to the end, without the sound it was asked for",
    "no_text": "an answer to the end, without the text it was asked for",
}
"""Why a request failed."""


@dataclass(slots=True)
class Answer:
    """What arrived, and when: seconds since the run began.

    Attributes:
        index: number of the request in its run.
        sent: when it was sent. late: how much later than its arrival time asked for (Poisson).
        first_text, last_text: when the first and the last text arrived; None where none did.
        ended: when the last byte arrived, or the error.
        playback: the sound.
        text: characters of text.
        text_tokens: as the server's usage counts them; None if it does not.
        input_audio_s: seconds of sound sent.
        error: one of ``ERROR_KINDS``, or None. message: what the server said.
    """

    index: int
    sent: float
    late: float = 0.0
    first_text: float | None = None
    last_text: float | None = None
    ended: float = 0.0
    playback: Playback = field(default_factory=Playback)
    text: int = 0
    text_tokens: int | None = None
    input_audio_s: float = 0.0
    error: str | None = None
    message: str = ""

    def says(self, text: str, at: float) -> None:
        """Text arrived."""
        if text:
            self.first_text = at if self.first_text is None else self.first_text
            self.last_text = at
            self.text += len(text)

    def fails(self, kind: str, message: str) -> None:
        """The request failed; the first reason counts."""
        if self.error is None:
            self.error, self.message = kind, message[:300]
