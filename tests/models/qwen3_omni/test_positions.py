"""Rope positions equal transformers' for every kind of prompt, for the thinker's ids and the talker's."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from omni_ray.models.qwen3_omni.media import audio_tokens
from omni_ray.models.qwen3_omni.positions import Grid, RopeLayout, rope_positions

AUDIO, IMAGE, VIDEO, VISION_START, VISION_END, AUDIO_START, AUDIO_END, TEXT = range(1, 9)
LAYOUT = RopeLayout(audio=AUDIO, image=IMAGE, video=VIDEO, per_second=13, spatial_merge=2)


class Prompt:
    """Builds the ids of a prompt and what upstream's function wants besides."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.grids: list[Grid] = []
        self.images: list[list[int]] = []
        self.videos: list[list[int]] = []
        self.seconds: list[float] = []
        self.sounds: list[int] = []
        self.sound_in_video = False

    def text(self, count: int) -> "Prompt":
        self.ids += [TEXT] * count
        return self

    def audio(self, frames: int) -> "Prompt":
        self.ids += [AUDIO_START, *[AUDIO] * audio_tokens(frames), AUDIO_END]
        self.sounds.append(frames)
        return self

    def image(self, height: int, width: int) -> "Prompt":
        grid = Grid(1, height, width)
        self.ids += [VISION_START, *[IMAGE] * grid.tokens(2), VISION_END]
        self.grids.append(grid)
        self.images.append([1, height, width])
        return self

    def video(self, time: int, height: int, width: int, seconds: float, frames: int | None = None) -> "Prompt":
        """With ``frames`` of sound, the placeholders interleave as upstream's processor writes them."""
        grid = Grid(time, height, width, seconds)
        self.grids.append(grid)
        self.videos.append([time, height, width])
        self.seconds.append(seconds)
        if frames is None:
            self.ids += [VISION_START, *[VIDEO] * grid.tokens(2), VISION_END]
            return self
        self.sound_in_video = True
        self.sounds.append(frames)
        steps = np.repeat(np.arange(time, dtype=np.float32) * np.float32(seconds) * 13, grid.tokens(2) // time)
        both = [(moment, 0, VIDEO) for moment in steps] + [(n, 1, AUDIO) for n in range(audio_tokens(frames))]
        self.ids += [VISION_START, AUDIO_START, *(token for _, _, token in sorted(both)), AUDIO_END, VISION_END]
        return self

    def upstream(self) -> tuple[torch.Tensor, float]:
        """Positions, and how far behind its place in the sequence ``generate`` puts the next token."""
        from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
            Qwen3OmniMoePreTrainedModelForConditionalGeneration as Upstream,
        )

        config = SimpleNamespace(
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            audio_token_id=AUDIO,
            vision_start_token_id=VISION_START,
            audio_start_token_id=AUDIO_START,
            position_id_per_seconds=13,
            audio_config=SimpleNamespace(n_window=50),
        )

        class Owner:
            spatial_merge_size = 2
            get_llm_pos_ids_for_vision = Upstream.get_llm_pos_ids_for_vision

            def __init__(self) -> None:
                self.config = config

        ids = torch.tensor([self.ids])
        axes, _ = Upstream.get_rope_index(
            Owner(),
            ids,
            torch.tensor(self.images) if self.images else None,
            torch.tensor(self.videos) if self.videos else None,
            torch.ones_like(ids),
            self.sound_in_video,
            torch.tensor(self.sounds) if self.sounds else None,
            torch.tensor(self.seconds) if self.seconds else None,
        )
        return axes[:, 0], float(axes[0, 0, -1] + 1 - len(self.ids))


PROMPTS: dict[str, Prompt] = {
    "text": Prompt().text(7),
    "audio": Prompt().text(3).audio(230).text(5),
    "two clips": Prompt().audio(1).text(1).audio(3001),
    "image": Prompt().text(3).image(4, 6).text(5),
    "image first and last": Prompt().image(8, 4).image(2, 2).text(2).image(4, 12),
    "wide image": Prompt().text(2).image(2, 40).text(9),
    "audio, image": Prompt().audio(150).text(4).image(6, 8).text(2),
    "image, audio": Prompt().text(1).image(6, 8).audio(99).text(2).image(2, 4).audio(500),
    "video": Prompt().text(3).video(3, 4, 6, 2.0).text(5),
    "video of fractions": Prompt().text(3).video(5, 4, 4, 0.3).text(2).video(2, 4, 4, 2 / 3).text(1),
    "video, image, audio": Prompt().video(2, 4, 4, 1.0).image(4, 4).text(2).audio(310).video(1, 2, 8, 2.0),
    "video with sound": Prompt().text(3).video(3, 4, 4, 1.0, frames=250).text(4),
    "video with long sound": Prompt().text(3).video(2, 4, 4, 1.0, frames=900).text(4),
    "wide video with short sound": Prompt().video(2, 2, 60, 0.5, frames=40).text(4).image(4, 4).text(1),
    "wide video with short sound, at the end": Prompt().text(1).video(1, 2, 60, 0.5, frames=10),
}


@pytest.mark.parametrize("name", PROMPTS)
def test_positions_equal_upstream(name: str) -> None:
    prompt = PROMPTS[name]
    expected, delta = prompt.upstream()
    ours = rope_positions(prompt.ids, prompt.grids, LAYOUT)
    assert np.array_equal(ours.axes, expected.numpy())
    assert ours.delta == delta


def test_random_prompts_equal_upstream() -> None:
    random = np.random.default_rng(7)
    for _ in range(60):
        prompt = Prompt().text(int(random.integers(1, 5)))
        for kind in random.choice(["text", "audio", "image", "video"], int(random.integers(1, 7))):
            height, width = (2 * int(n) for n in random.integers(1, 7, 2))
            if kind == "text":
                prompt.text(int(random.integers(1, 9)))
            elif kind == "audio":
                prompt.audio(int(random.integers(1, 700)))
            elif kind == "image":
                prompt.image(height, width)
            else:
                prompt.video(int(random.integers(1, 4)), height, width, float(random.choice([2.0, 1.0, 0.4])))
        expected, delta = prompt.upstream()
        ours = rope_positions(prompt.ids, prompt.grids, LAYOUT)
        assert np.array_equal(ours.axes, expected.numpy())
        assert ours.delta == delta


def test_the_talkers_prompt_needs_only_the_grids_of_its_own_turns() -> None:
    """User ids and nine pads; upstream's talker raises here, because its config knows no audio."""
    prompt = Prompt().text(2).audio(120).image(4, 6).text(3).text(9)
    expected, _ = prompt.upstream()
    assert np.array_equal(rope_positions(prompt.ids, prompt.grids, LAYOUT).axes, expected.numpy())


@pytest.mark.parametrize("grids", [(Grid(1, 4, 4),), (Grid(1, 4, 6), Grid(1, 2, 2))])
def test_grids_that_do_not_fit_are_an_error(grids: Any) -> None:
    with pytest.raises(ValueError, match="image or video"):
        rope_positions(Prompt().image(4, 6).ids, grids, LAYOUT)


def test_audio_token_counts() -> None:
    """Golden: 13 per second; 2 s give 26, one mel frame gives one."""
    assert [audio_tokens(n) for n in (1, 8, 9, 99, 100, 101, 200, 3000)] == [1, 1, 2, 13, 13, 14, 26, 390]
