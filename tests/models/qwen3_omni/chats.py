"""Chats of every kind for the tests of this folder, and what upstream's own functions make of them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from omni_ray.engine.types import AudioClip, ImageClip, MediaPart, Message, TextPart, VideoClip
from omni_ray.models.qwen3_omni.prompt import ChatPrompt

RATE = 16000


def tone(samples: int, frequency: float = 440.0) -> NDArray[np.float32]:
    """A sine with a little noise, always the same."""
    noise = np.random.default_rng(samples).standard_normal(samples)
    return (0.1 * np.sin(2 * np.pi * frequency * np.arange(samples) / RATE) + 0.01 * noise).astype(np.float32)


def picture(height: int, width: int) -> NDArray[np.uint8]:
    """Random pixels, always the same ones for a size."""
    return np.random.default_rng(height * 1000 + width).integers(0, 255, (height, width, 3), dtype=np.uint8)


def film(frames: int, height: int, width: int) -> NDArray[np.uint8]:
    """Random pixels that change, always the same ones for a size."""
    seed = frames * 1_000_000 + height * 1000 + width
    return np.random.default_rng(seed).integers(0, 255, (frames, height, width, 3), dtype=np.uint8)


def chat(*turns: tuple[Any, ...]) -> ChatPrompt:
    """A chat of turns (role, part ...).

    A str is text, an int a sound of so many samples, a pair an image's size, and more numbers a video: frames, height,
    width, and samples of its sound if there is any.
    """
    messages: list[Message] = []
    clips: dict[int, AudioClip] = {}
    images: dict[int, ImageClip] = {}
    videos: dict[int, VideoClip] = {}
    index = 0
    for role, *parts in turns:
        content: list[TextPart | MediaPart] = []
        for part in parts:
            if isinstance(part, str):
                content.append(TextPart(part))
                continue
            if isinstance(part, int):
                clips[index] = AudioClip(index, tone(part, 300 + 70 * index), RATE)
                content.append(MediaPart("audio", index))
            elif len(part) == 2:
                images[index] = ImageClip(index, picture(*part))
                content.append(MediaPart("image", index))
            else:
                videos[index] = VideoClip(index, film(*part[:3]), 2.0)
                content.append(MediaPart("video", index))
                if part[3:]:
                    clips[index] = AudioClip(index, tone(part[3]), RATE)
            index += 1
        messages.append(Message(role, tuple(content)))
    return ChatPrompt(tuple(messages), clips, images, videos)


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
    "video": chat(("user", (4, 48, 64), "describe")),
    "video with sound": chat(("user", "Say", (3, 90, 40, 30000), "what")),
    "videos with sound, image, audio": chat(
        ("user", (64, 96), "x", (2, 40, 40, 9000), 20000, "and"), ("assistant", "ok"), ("user", (1, 30, 30, 1000), "?")
    ),
}
"""They need Pillow."""


def upstream_inputs(directory: Path, prompt: ChatPrompt, ids: tuple[int, ...]) -> dict[str, Any]:
    """What upstream's processor gives its model, made of the processor's own parts.

    But for the patches of videos, whose maker needs torchvision; that ours equal it is tested in ``test_video``.
    """
    from transformers import WhisperFeatureExtractor

    tokens = torch.tensor([ids])
    inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
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
    if prompt.videos:
        from omni_ray.models.qwen3_omni.video_patches import VideoPatches

        maker = VideoPatches.of(directory)
        grids = {clip.index: maker.grid(clip) for clip in prompt.videos.values()}
        inputs["pixel_values_videos"] = torch.cat([maker.patches(c, grids[c.index]) for c in prompt.videos.values()])
        inputs["video_grid_thw"] = torch.tensor([[g.time, g.height, g.width] for g in grids.values()])
        inputs["video_second_per_grid"] = torch.tensor([grid.seconds for grid in grids.values()])
        inputs["use_audio_in_video"] = bool(set(prompt.videos) & set(prompt.clips))
    return inputs
