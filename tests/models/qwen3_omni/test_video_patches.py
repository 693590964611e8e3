"""Patches of videos are those of transformers' video processor, and prompts those of its whole processor."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chats import chat, film

from omni_ray.config.pipeline import VideoSampling
from omni_ray.engine.types import VideoClip
from omni_ray.models.qwen3_omni.media import MediaReader
from omni_ray.models.qwen3_omni.positions import Grid
from omni_ray.models.qwen3_omni.prompt import ChatPrompt
from omni_ray.models.qwen3_omni.thinker_prompt import PromptMaker
from omni_ray.models.qwen3_omni.video_patches import VideoPatches


def maker_of(directory: Path) -> PromptMaker:
    from transformers import AutoTokenizer, Qwen3OmniMoeConfig

    config = Qwen3OmniMoeConfig.from_pretrained(directory)
    return PromptMaker(AutoTokenizer.from_pretrained(directory), config, MediaReader(directory), 100_000)


def test_each_frame_is_cut_as_an_image_is(tiny_checkpoint: Path) -> None:
    """Upstream's image processor repeats a picture in a patch, where a video has its next frame."""
    from transformers import Qwen2VLImageProcessorPil

    frames = film(3, 320, 480)  # a size that is not changed
    maker = VideoPatches.of(tiny_checkpoint)
    clip = VideoClip(0, frames, 2.0)
    grid = maker.grid(clip)
    assert grid == Grid(2, 20, 30, 1.0)
    images = Qwen2VLImageProcessorPil.from_pretrained(tiny_checkpoint)
    cut = images(
        images=list(frames), return_tensors="pt", size={"shortest_edge": 1, "longest_edge": 10**6}
    )["pixel_values"].view(3, 600, 3, 2, 256)  # fmt: skip
    expected = torch.stack([cut[0], cut[2]])
    expected[0, :, :, 1] = cut[1, :, :, 0]  # the last frame fills up its step, as an image does
    assert torch.allclose(maker.patches(clip, grid), expected.view(1200, -1), atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((4, 48, 64), (2, 20, 28)),  # enlarged
        ((5, 1080, 1920), (3, 40, 72)),  # shrunk
        ((1, 400, 400), (1, 24, 24)),  # one frame
        ((768, 1080, 1920), (384, 24, 46)),  # all frames together are bounded
    ],
)
def test_sizes(shape: tuple[int, int, int], grid: tuple[int, int, int], tiny_checkpoint: Path) -> None:
    clip = VideoClip(0, np.broadcast_to(np.uint8(0), (*shape, 3)), 2.0)
    found = VideoPatches.of(tiny_checkpoint).grid(clip)
    assert (found.time, found.height, found.width, found.seconds) == (*grid, 1.0)


def test_sound_lies_between_the_frames_by_time(tiny_checkpoint: Path) -> None:
    """Golden: 13 tokens of sound a second, a step of frames each second, the frames first."""
    maker = maker_of(tiny_checkpoint)
    layout = maker._layout
    ids = maker.make(chat(("user", (6, 48, 64, 32_000)))).ids
    sound, frame = layout.audio, layout.video
    runs = [(sound if token == sound else frame) for token in ids if token in (sound, frame)]
    borders = [0, *(np.flatnonzero(np.diff(runs)) + 1).tolist(), len(runs)]
    lengths = [last - first for first, last in pairwise(borders)]
    assert runs[0] == frame
    assert lengths == [140, 13, 140, 13, 140]
    start, end = maker._sound_marks
    first, last = ids.index(start), ids.index(end)
    assert (ids[first + 1], ids[last - 1]) == (frame, frame)


def upstream_processor(directory: Path) -> Any:
    pytest.importorskip("torchvision", reason="transformers' video processor needs it", exc_type=ImportError)
    from transformers import AutoTokenizer, Qwen2VLImageProcessorPil, Qwen3OmniMoeProcessor, WhisperFeatureExtractor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    return Qwen3OmniMoeProcessor(
        Qwen2VLImageProcessorPil.from_pretrained(directory),
        Qwen2VLVideoProcessor.from_pretrained(directory),
        WhisperFeatureExtractor.from_pretrained(directory),
        AutoTokenizer.from_pretrained(directory),
    )


@pytest.mark.parametrize(
    ("count", "height", "width", "samples"),
    [(60, 48, 64, None), (61, 480, 640, 30_000), (3, 100, 37, None), (150, 384, 384, 200_000), (30, 720, 1280, 7000)],
)
def test_ids_and_patches_equal_upstreams_processor(
    count: int, height: int, width: int, samples: int | None, tiny_checkpoint: Path
) -> None:
    """From all frames of a video at 30 a second to ids and patches, bit by bit; needs torchvision."""
    from transformers.video_utils import VideoMetadata

    upstream = upstream_processor(tiny_checkpoint)
    frames = film(count, height, width)
    taken = frames[VideoSampling().indices(count, 30)]
    sound = () if samples is None else (samples,)
    prompt = chat(("user", "Say", (*taken.shape[:3], *sound), "what"))
    prompt = ChatPrompt(prompt.messages, prompt.clips, {}, {0: VideoClip(0, taken, 2.0)})
    maker = maker_of(tiny_checkpoint)
    ours = maker.make(prompt)
    text = maker._tokenizer.apply_chat_template(prompt.templated(), tokenize=False, add_generation_prompt=True)
    capped = "cap_pixels_per_frame" in upstream.video_processor.valid_kwargs.__annotations__
    theirs = upstream(
        text=[text],
        videos=[frames],
        video_metadata=[VideoMetadata(total_num_frames=count, fps=30)],
        audio=[clip.samples for clip in prompt.clips.values()] or None,
        fps=2.0,
        do_sample_frames=True,
        use_audio_in_video=samples is not None,
        return_tensors="pt",
        **({"cap_pixels_per_frame": True} if capped else {}),
    )
    assert ours.ids == theirs["input_ids"][0].tolist()
    assert ours.pictures is not None
    assert torch.equal(ours.pictures.patches, theirs["pixel_values_videos"])
    assert [[g.time, g.height, g.width] for g in ours.pictures.grids] == theirs["video_grid_thw"].tolist()
    assert [g.seconds for g in ours.pictures.grids] == list(theirs["video_second_per_grid"])


def test_the_frames_taken_are_upstreams(tiny_checkpoint: Path) -> None:
    """But for upstream's rounding fault: it may name one frame more than there is room for, even one beyond the end."""
    from transformers.video_utils import VideoMetadata

    upstream = upstream_processor(tiny_checkpoint).video_processor
    for count in range(2, 400):
        for rate in (1, 7.5, 24, 29.97, 30, 30.0025, 60, 119.88):
            theirs = upstream.sample_frames(VideoMetadata(total_num_frames=count, fps=rate), fps=2.0).tolist()
            ours = VideoSampling().indices(count, rate)
            assert ours == theirs[: len(ours)]
            assert len(theirs) - len(ours) in (0, 1)
            assert len(ours) % 2 == 0
