"""What Qwen2.5-Omni is asked: a chat whose parts are text, sounds and images. No heavy imports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from omni_ray.engine.types import AudioClip, ImageClip, MediaPart, Message, TextPart
from omni_ray.errors import InvalidRequestError

CHAT_TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif c['type'] == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's turns and this family's placeholders, written by us: used where a checkpoint brings no chat template."""

TURNS: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "user"}
"""Whose turn each of OpenAI's roles is. A tool's answer stands in a user turn, between marks."""


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat, oldest message first; parts name their media by index. No system message is inserted (cases.md C41)."""

    messages: tuple[Message, ...]
    clips: Mapping[int, AudioClip] = field(default_factory=dict)
    images: Mapping[int, ImageClip] = field(default_factory=dict)

    def templated(self) -> list[dict[str, object]]:
        """Messages as chat templates take them.

        Raises:
            InvalidRequestError: a role that the model does not know.
        """
        turns: list[dict[str, object]] = []
        for message in self.messages:
            if message.role not in TURNS:
                raise InvalidRequestError(f"unknown role {message.role!r}; known are {', '.join(TURNS)}", "messages")
            parts = [
                {"type": "text", "text": part.text} if isinstance(part, TextPart) else {"type": part.kind}
                for part in message.content
            ]
            if message.role == "tool":
                marks = [{"type": "text", "text": mark} for mark in ("<tool_response>\n", "\n</tool_response>")]
                parts = [marks[0], *parts, marks[1]]
            turns.append({"role": TURNS[message.role], "content": parts})
        return turns

    def texts(self) -> list[str]:
        """What people wrote, in order."""
        return [part.text for message in self.messages for part in message.content if isinstance(part, TextPart)]

    def media(self) -> list[AudioClip | ImageClip]:
        """Sounds and images in order of appearance."""
        parts = [part for message in self.messages for part in message.content if isinstance(part, MediaPart)]
        return [self.clips[part.index] if part.kind == "audio" else self.images[part.index] for part in parts]
