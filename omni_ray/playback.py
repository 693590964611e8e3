"""What a listener would hear: a player that starts with the first sound and plays at real-time speed."""

from dataclasses import dataclass


@dataclass(slots=True)
class Playback:
    """One stream, as it arrives. All times are seconds of one monotonic clock.

    The player begins at the first sound. When a piece arrives, the deficit is the time since then minus the sound that
    had come before. The worst deficit is also how long a player that stops and waits has stood still in all.

    Attributes:
        first, last: when the first and the last sound arrived; None before any.
        audio_s: seconds of sound received.
        underrun_s: the worst deficit; 0 if the player never had to wait.
    """

    first: float | None = None
    last: float | None = None
    audio_s: float = 0.0
    underrun_s: float = 0.0

    def arrived(self, at: float, seconds: float) -> None:
        """``seconds`` of sound arrived at ``at``; a piece without sound (a header) is none."""
        if seconds <= 0:
            return
        if self.first is None:
            self.first = at
        else:
            self.underrun_s = max(self.underrun_s, at - self.first - self.audio_s)
        self.last = at
        self.audio_s += seconds

    def lead_s(self, now: float) -> float | None:
        """Seconds of sound in hand: below 0 the player stands still. None before the first sound."""
        return None if self.first is None else self.audio_s - (now - self.first)
