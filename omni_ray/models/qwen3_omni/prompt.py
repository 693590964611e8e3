"""What Qwen3-Omni is asked: a chat whose parts are text and media. No heavy imports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from omni_ray.engine.chat_turns import chat_turns
from omni_ray.engine.types import AudioClip, ImageClip, MediaPart, Message, VideoClip

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
        return chat_turns(self.messages)

    def media(self) -> list[MediaPart]:
        """Media parts in order of appearance."""
        return [part for message in self.messages for part in message.content if isinstance(part, MediaPart)]
