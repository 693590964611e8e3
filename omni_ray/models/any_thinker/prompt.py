"""What ``any_thinker`` is asked: a chat whose parts are text, sound and pictures. No heavy imports."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from omni_ray.engine.types import AudioClip, ImageClip, Message


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A chat, oldest message first, with the media that its parts name by index."""

    messages: tuple[Message, ...]
    sounds: Mapping[int, AudioClip] = field(default_factory=dict)
    images: Mapping[int, ImageClip] = field(default_factory=dict)
