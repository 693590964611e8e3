"""A chat as the templates of Qwen's models take it."""

from collections.abc import Iterable, Sequence
from typing import Final

from omni_ray.engine.types import AudioClip, Message, TextPart
from omni_ray.errors import InvalidRequestError

ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "user"}
"""OpenAI's roles and the turns they become. A tool's answer stands in a user turn, between marks."""


def chat_turns(messages: Sequence[Message]) -> list[dict[str, object]]:
    """Messages in the form of transformers' ``apply_chat_template``; a medium is a part of its kind.

    System messages stay as they are, in order and in place, and none is inserted (cases.md C41).

    Raises:
        InvalidRequestError: a role that the models do not know.
    """
    return [{"role": _role(message), "content": _content(message)} for message in messages]


def _role(message: Message) -> str:
    role = ROLES.get(message.role)
    if role is None:
        raise InvalidRequestError(f"unknown role {message.role!r}; known are {', '.join(ROLES)}", "messages")
    return role


def _content(message: Message) -> list[dict[str, str]]:
    parts: list[dict[str, str]] = [
        {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": part.kind}
        for part in message.content
    ]
    if message.role == "tool":
        before = {"type": "text", "text": "<tool_response>\n"}
        return [before, *parts, {"type": "text", "text": "\n</tool_response>"}]
    return parts


def refuse_marks(messages: Sequence[Message], reserved: Sequence[str]) -> None:
    """``InvalidRequestError`` if a text holds one of the template's own tokens."""
    for message in messages:
        for part in message.content:
            for token in reserved:
                if isinstance(part, TextPart) and token in part.text:
                    raise InvalidRequestError(f"a text holds the reserved token {token!r}", "messages")


def refuse_long_sound(clips: Iterable[AudioClip], tokens_per_second: int, longest: int) -> None:
    """``InvalidRequestError`` if all clips together become more than ``longest`` tokens."""
    seconds = sum(len(clip.samples) / clip.sample_rate for clip in clips)
    if seconds * tokens_per_second > longest:
        most = longest / tokens_per_second
        raise InvalidRequestError(
            f"{seconds:.0f} s of audio; this server takes at most {most:.0f} s in a chat", "messages"
        )
