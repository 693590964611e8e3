"""Chats of every kind for the tests of this folder, and what upstream's own functions make of them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from omni_ray.engine.types import AudioClip, ImageClip, MediaPart, Message, TextPart
from omni_ray.models.qwen2_5_omni.flow import start_noise
from omni_ray.models.qwen2_5_omni.prompt import ChatPrompt
from omni_ray.models.qwen2_5_omni.tiny_config import EOS, MEL, PAD

RATE = 16000
TOKENS = 14


def tone(samples: int) -> NDArray[np.float32]:
    noise = np.random.default_rng(samples).standard_normal(samples)
    return (0.1 * np.sin(np.arange(samples) * 0.17) + 0.01 * noise).astype(np.float32)


def picture(height: int, width: int) -> NDArray[np.uint8]:
    return np.random.default_rng(height * 1000 + width).integers(0, 255, (height, width, 3), dtype=np.uint8)


def chat(*turns: tuple[Any, ...]) -> ChatPrompt:
    """A chat of turns (role, part ...): a str is text, an int a sound of so many samples, a pair an image's size."""
    messages: list[Message] = []
    clips: dict[int, AudioClip] = {}
    images: dict[int, ImageClip] = {}
    index = 0
    for role, *parts in turns:
        content: list[TextPart | MediaPart] = []
        for part in parts:
            if isinstance(part, str):
                content.append(TextPart(part))
                continue
            if isinstance(part, int):
                clips[index] = AudioClip(index, tone(part), RATE)
                content.append(MediaPart("audio", index))
            else:
                images[index] = ImageClip(index, picture(*part))
                content.append(MediaPart("image", index))
            index += 1
        messages.append(Message(role, tuple(content)))
    return ChatPrompt(tuple(messages), clips, images)


CHATS = {
    "text": chat(("system", "You are a helpful assistant."), ("user", "Hello, how are you today?")),
    "several turns": chat(("user", "Hello"), ("assistant", "Hello world"), ("user", "one two three " * 60)),
    "audio": chat(("user", 32000, "Please describe this audio.")),
    "image": chat(("user", (60, 100), "describe")),
    "everything": chat(
        ("system", "Say"),
        ("user", (60, 100), 20000, "x"),
        ("assistant", "ok", (33, 40)),
        ("user", (130, 33), "one two three " * 40, 5000),
    ),
}
"""Images need Pillow."""


def upstream_inputs(directory: Path, prompt: ChatPrompt, ids: tuple[int, ...]) -> dict[str, Any]:
    """What upstream's processor gives its model, made of the processor's own parts."""
    from transformers import Qwen2VLImageProcessorPil, WhisperFeatureExtractor

    tokens = torch.tensor([ids])
    inputs: dict[str, Any] = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    if prompt.clips:
        features = WhisperFeatureExtractor.from_pretrained(directory)(
            [clip.samples for clip in prompt.clips.values()],
            sampling_rate=RATE,
            padding="max_length",
            return_attention_mask=True,
            return_tensors="pt",
        )
        inputs["input_features"], inputs["feature_attention_mask"] = features.values()
    if prompt.images:
        reader = Qwen2VLImageProcessorPil.from_pretrained(directory)
        features = reader(images=[image.pixels for image in prompt.images.values()], return_tensors="pt")
        inputs["pixel_values"], inputs["image_grid_thw"] = features["pixel_values"], features["image_grid_thw"]
    return inputs


def padded(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same chat behind one masked token, as in a batch with a longer one: it changes no answer.

    transformers 5.19 and 5.24 drop a mask that hides nothing, and without a mask their talker adds neither the codec's
    padding nor its start to the prompt, and forgets where images are. So an unpadded chat is spoken otherwise than the
    same chat in a batch, and otherwise than by 5.17. Pixels must be addressed to the thinker: its talker refuses them.
    """
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    return {
        **{f"thinker_{name}" if name == "pixel_values" else name: value for name, value in inputs.items()},
        "input_ids": torch.cat((torch.zeros_like(ids[:, :1]), ids), 1),
        "attention_mask": torch.cat((torch.zeros_like(mask[:, :1]), mask), 1),
    }


@torch.no_grad()
def monolith(
    upstream: Any, inputs: dict[str, Any], frames: int, seed: int, end: int | None = None, **more: Any
) -> tuple[list[int], NDArray[np.int64], NDArray[np.float32]]:
    """Text, codes [n, 1] and sound of one upstream ``generate``, greedy, whose diffusion starts from our noise."""
    kept: list[NDArray[np.int64]] = []
    dit = upstream.token2wav.code2wav_dit_model
    sample = dit.sample

    def sampled(conditioning: Any, mel: Any, codes: Any, **options: Any) -> Any:
        kept.append(codes[0, :, None].numpy())
        noise = torch.from_numpy(start_noise(seed, 2 * codes.shape[1], MEL))[None]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "randn", lambda *_, **__: noise)
            return sample(conditioning, mel, codes, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dit, "sample", sampled)
        sequences, sound = upstream.generate(
            **inputs,
            speaker="Ethan",
            thinker_max_new_tokens=TOKENS,
            thinker_do_sample=False,
            thinker_eos_token_id=end,
            talker_do_sample=False,
            **{"talker_max_new_tokens": frames, "talker_eos_token_id": [PAD, EOS], **more},
        )
    return sequences[0, inputs["input_ids"].shape[1] :].tolist(), kept[0], sound.numpy()
