"""What Qwen2.5-Omni is asked: a chat whose parts are text, sounds and images. No heavy imports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from omni_ray.engine.chat_turns import chat_turns
from omni_ray.engine.types import AudioClip, ImageClip, MediaPart, Message

CHAT_TEMPLATE: Final = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>"
    "{% elif c['type'] == 'image' %}<|vision_bos|><|IMAGE|><|vision_eos|>"
    "{% elif 'text' in c %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's turns and this family's placeholders, written by us: used where a checkpoint brings no chat template."""


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
        return chat_turns(self.messages)

    def media(self) -> list[AudioClip | ImageClip]:
        """Sounds and images in order of appearance."""
        parts = [part for message in self.messages for part in message.content if isinstance(part, MediaPart)]
        return [self.clips[part.index] if part.kind == "audio" else self.images[part.index] for part in parts]
