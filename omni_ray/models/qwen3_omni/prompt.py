"""What Qwen3-Omni is asked: a chat whose parts are text and media. No heavy imports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from omni_ray.engine.types import AudioClip, ImageClip, MediaPart, Message, TextPart, VideoClip
from omni_ray.errors import InvalidRequestError

CHAT_TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'audio' or 'audio' in c %}<|audio_start|><|audio_pad|><|audio_end|>"
    "{% elif c['type'] == 'image' or 'image' in c %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'video' or 'video' in c %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's turns and placeholders, written by us: used where a checkpoint brings no chat template."""

ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "user"}
"""OpenAI's roles and the turns they become. Qwen models read a tool's answer in a user turn, between marks."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat, oldest message first, with the media that its parts name by index; a video may have a sound of its index.

    System messages stay as they are, in order and in place, and none is inserted (cases.md C41): the model's first two
    stages need no required one, and the talker never hears them.
    """

    messages: tuple[Message, ...]
    clips: Mapping[int, AudioClip] = field(default_factory=dict)
    images: Mapping[int, ImageClip] = field(default_factory=dict)
    videos: Mapping[int, VideoClip] = field(default_factory=dict)

    def templated(self) -> list[dict[str, object]]:
        """Messages as chat templates take them.

        Raises:
            InvalidRequestError: a role that the model does not know.
        """
        return [{"role": _role(message), "content": _content(message)} for message in self.messages]

    def media(self) -> list[MediaPart]:
        """Media parts in order of appearance."""
        return [part for message in self.messages for part in message.content if isinstance(part, MediaPart)]


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
