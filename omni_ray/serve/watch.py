"""What one process notes of a request while it runs; read once, at its end, by metrics and traces."""

import time
from dataclasses import dataclass, field

from omni_ray.engine.types import AudioChunk, CodeFrameChunk, Finish, ImageChunk, Output, TextChunk, Usage
from omni_ray.playback import Playback


@dataclass(slots=True)
class Watch:
    """Instants are of the monotonic clock; ``began_at`` is the same instant as ``began`` on the wall clock.

    Attributes:
        frame_rate: code frames for one second of sound, which are then followed like the sound itself.
        asked: when the engine first asked for input, so it had a place; None if it never did.
        fed: when the first input came.
        first, first_text: when the first output, and the first text, came.
        usage: what the engine counted; None before its finish.
        playback: the sound.
        images: finished pictures.
    """

    began: float = field(default_factory=time.monotonic)
    began_at: float = field(default_factory=time.time)
    frame_rate: float | None = None
    asked: float | None = None
    fed: float | None = None
    first: float | None = None
    first_text: float | None = None
    usage: Usage | None = None
    playback: Playback = field(default_factory=Playback)
    images: int = 0

    def wall(self, instant: float) -> float:
        """``instant`` on the wall clock."""
        return self.began_at + (instant - self.began)

    def asks(self) -> None:
        """The engine asks for input."""
        if self.asked is None:
            self.asked = time.monotonic()

    def feeds(self) -> None:
        """An input came; called for every one."""
        if self.fed is None:
            self.fed = time.monotonic()

    def output(self, output: Output) -> None:
        """An output passes; called for every one, so it does next to nothing for text."""
        if self.first is None:
            self.first = time.monotonic()
        if isinstance(output, AudioChunk):
            self.playback.arrived(time.monotonic(), len(output.samples) / output.sample_rate)
        elif isinstance(output, CodeFrameChunk):
            if self.frame_rate is not None:
                self.playback.arrived(time.monotonic(), len(output.frames) / self.frame_rate)
        elif isinstance(output, TextChunk):
            if self.first_text is None:
                self.first_text = time.monotonic()
        elif isinstance(output, ImageChunk):
            self.images += output.ends_picture and not output.preview
        elif isinstance(output, Finish):
            self.usage = output.usage
