"""Chats of every kind for the tests of this folder, and what upstream's own functions make of them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from omni_ray.engine.types import AudioClip, ImageClip, MediaPart, Message, TextPart
from omni_ray.models.qwen3_omni.prompt import ChatPrompt

RATE = 16000


def tone(samples: int, frequency: float = 440.0) -> NDArray[np.float32]:
    """A sine with a little noise, always the same."""
    noise = np.random.default_rng(samples).standard_normal(samples)
    return (0.1 * np.sin(2 * np.pi * frequency * np.arange(samples) / RATE) + 0.01 * noise).astype(np.float32)


def picture(height: int, width: int) -> NDArray[np.uint8]:
    """Random pixels, always the same ones for a size."""
    return np.random.default_rng(height * 1000 + width).integers(0, 255, (height, width, 3), dtype=np.uint8)


def chat(*turns: tuple[Any, ...]) -> ChatPrompt:
    """A chat of turns (role, part ...): a str is text, an int a sound of so many samples, a pair an image's size."""
    messages: list[Message] = []
    clips: dict[int, AudioClip] = {}
    images: dict[int, ImageClip] = {}
    for role, *parts in turns:
        content: list[TextPart | MediaPart] = []
        for part in parts:
            index = len(clips) + len(images)
            if isinstance(part, str):
                content.append(TextPart(part))
            elif isinstance(part, int):
                clips[index] = AudioClip(index, tone(part, 300 + 70 * index), RATE)
                content.append(MediaPart("audio", index))
            else:
                images[index] = ImageClip(index, picture(*part))
                content.append(MediaPart("image", index))
        messages.append(Message(role, tuple(content)))
    return ChatPrompt(tuple(messages), clips, images)


CHATS = {
    "text": chat(("system", "You are a helpful assistant."), ("user", "Hello, how are you today?")),
    "several turns": chat(("user", "Hello"), ("assistant", "Hello world"), ("user", "one two three " * 60)),
    "audio": chat(("user", 32000, "Please describe this audio.")),
    "two clips, one short": chat(("user", 3000, 50000, "Please")),
    "31 s of audio": chat(("user", 31 * RATE)),
    "audio in an earlier turn": chat(("user", 16000), ("assistant", "ok"), ("user", "and"), ("system", 8000)),
}

PICTURE_CHATS = {
    "image": chat(("user", (64, 96), "describe")),
    "audio and image": chat(("user", 20000, "and ", (64, 96), " describe")),
    "everything": chat(
        ("system", "Say"),
        ("user", (64, 96), 20000, "x"),
        ("assistant", "ok", (33, 40)),
        ("user", (130, 33), (32, 32), "one two three " * 40, 5000),
    ),
}
"""They need Pillow."""


def upstream_inputs(directory: Path, prompt: ChatPrompt, ids: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """What upstream's processor gives its model, made of the processor's own parts."""
    from transformers import WhisperFeatureExtractor

    tokens = torch.tensor([ids])
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if prompt.clips:
        features = WhisperFeatureExtractor.from_pretrained(directory)(
            [clip.samples for clip in prompt.clips.values()],
            sampling_rate=RATE,
            padding=True,
            truncation=False,
            return_attention_mask=True,
            return_tensors="pt",
        )
        inputs["input_features"], inputs["feature_attention_mask"] = features.values()
    if prompt.images:
        from transformers import Qwen2VLImageProcessorPil

        reader = Qwen2VLImageProcessorPil.from_pretrained(directory)
        inputs.update(reader(images=[image.pixels for image in prompt.images.values()], return_tensors="pt"))
    return inputs
