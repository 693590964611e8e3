"""Whose requests are served first where there is not enough for all: smaller numbers, and chat before batch speech."""

from typing import Final

CHAT: Final = 0
SPEECH: Final = 1
"""Also transcriptions and pictures."""
WHOLE_SPEECH: Final = 2
"""Speech that is sent in one piece: nobody listens while it is made."""


def priority_of(asked: int | None, default: int) -> int:
    """The priority of a request: its route's, or a larger number if it asks for one. Nobody may jump the line."""
    return default if asked is None else max(asked, default)
