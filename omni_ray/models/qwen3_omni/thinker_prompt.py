"""A chat prepared for the thinker: token ids with placeholders expanded, rope positions, features of its media.

``PromptMaker`` does what transformers' ``Qwen3OmniMoeProcessor`` does for text, sound, images and videos, but on ids
instead of text: special tokens split the text around them, so both give the same ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omni_ray.engine.chat_turns import refuse_long_sound, refuse_marks
from omni_ray.engine.transformers_media import Sounds
from omni_ray.engine.types import ImageClip, MediaPart, VideoClip
from omni_ray.models.qwen3_omni.media import TOKENS_PER_SECOND, MediaReader, Pictures, VisualRows, audio_tokens
from omni_ray.models.qwen3_omni.positions import Axes, Grid, RopeLayout, rope_positions
from omni_ray.models.qwen3_omni.prompt import CHAT_TEMPLATE, ChatPrompt


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive positions of a prompt, t of them.

    Attributes:
        ids: token ids [t]. axes: float32 [3, t].
        heard, seen: rows of media placeholders in this piece, in order; ``heard_at`` and ``seen_at`` say where.
        wanted: int64 [m], positions whose hidden rows are given out.
    """

    ids: Sequence[int]
    axes: Axes
    heard: Tensor | None
    heard_at: Tensor
    seen: VisualRows | None
    seen_at: Tensor
    wanted: Tensor


@dataclass(slots=True)
class ThinkerPrompt:
    """A ``Prepared`` prompt of n positions.

    Attributes:
        ids: token ids [n].
        axes: float32 [3, n]. ``delta`` is added to a later token's place to get its rope position.
        heard_at, seen_at: int64, positions of audio and of image or video placeholders.
        wanted: int64, positions of media placeholders in user turns.
        user_grids: of the images and videos among them.
        sound, pictures: features; ``heard`` and ``seen`` are what the towers made of them.
    """

    ids: list[int]
    axes: Axes
    delta: float
    heard_at: Any
    seen_at: Any
    wanted: Any
    user_grids: tuple[Grid, ...] = ()
    sound: Sounds | None = None
    pictures: Pictures | None = None
    heard: Tensor | None = None
    seen: VisualRows | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def feature_bytes(self) -> int:
        """Bytes of what the towers made of its media."""
        seen = () if self.seen is None else (self.seen.rows, *self.seen.deepstack)
        heard = () if self.heard is None else (self.heard,)
        return sum(int(tensor.nbytes) for tensor in (*heard, *seen))

    def __getitem__(self, piece: slice) -> Piece:
        start, stop, _ = piece.indices(len(self.ids))
        heard, seen = _inside(self.heard_at, start, stop), _inside(self.seen_at, start, stop)
        visual = self.seen
        if visual is not None:
            visual = VisualRows(visual.rows[seen], tuple(rows[seen] for rows in visual.deepstack))
        return Piece(
            ids=self.ids[start:stop],
            axes=self.axes[:, start:stop],
            heard=None if self.heard is None else self.heard[heard],
            heard_at=torch.from_numpy(self.heard_at[heard] - start),
            seen=visual,
            seen_at=torch.from_numpy(self.seen_at[seen] - start),
            wanted=torch.from_numpy(self.wanted[_inside(self.wanted, start, stop)] - start),
        )


class PromptMaker:
    """Prepares chats; holds the tokenizer and the ids of the checkpoint's config."""

    def __init__(self, tokenizer: Any, config: Any, media: MediaReader, longest: int) -> None:
        """Take what preparing needs.

        Args:
            tokenizer: of the checkpoint; its chat template is used if it has one.
            config: transformers' ``Qwen3OmniMoeConfig``.
            media: makes features.
            longest: positions that a prompt may have at most; media beyond it is refused before it is computed.
        """
        thinker = config.thinker_config
        self._tokenizer = tokenizer
        self._template = tokenizer.chat_template or CHAT_TEMPLATE
        self._media = media
        self._longest = longest
        self._im_start, self._user = config.im_start_token_id, config.user_token_id
        self._sound_marks = thinker.audio_start_token_id, thinker.audio_end_token_id
        self._layout = RopeLayout(
            audio=thinker.audio_token_id,
            image=thinker.image_token_id,
            video=thinker.video_token_id,
            per_second=thinker.position_id_per_seconds,
            spatial_merge=thinker.vision_config.spatial_merge_size,
        )
        self._reserved = tuple(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)

    def make(self, prompt: ChatPrompt) -> ThinkerPrompt:
        """Prepare a chat.

        Raises:
            InvalidRequestError: a role or a medium that cannot be taken, a reserved token in a text, or too long sound.
        """
        turns = prompt.templated()
        refuse_marks(prompt.messages, self._reserved)
        refuse_long_sound(prompt.clips.values(), TOKENS_PER_SECOND, self._longest)
        text = self._tokenizer.apply_chat_template(
            turns, chat_template=self._template, tokenize=False, add_generation_prompt=True
        )
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        parts = prompt.media()
        clips = [prompt.clips[part.index] for part in parts if part.index in prompt.clips]
        visual = [_visual(prompt, part) for part in parts if part.kind != "audio"]
        sound = self._media.sound(clips) if clips else None
        pictures = self._media.pictures(visual, self._longest) if visual else None
        grids = () if pictures is None else pictures.grids
        rows = {} if sound is None else dict(zip((c.index for c in clips), sound.frames.tolist(), strict=True))
        grid_of = dict(zip((clip.index for clip in visual), grids, strict=True))
        expanded = self._expanded(
            ids, [self._placeholders(rows.get(p.index), grid_of.get(p.index), p.kind) for p in parts]
        )
        tokens = np.asarray(expanded)
        positions = rope_positions(expanded, grids, self._layout)
        audio, seen = tokens == self._layout.audio, np.isin(tokens, (self._layout.image, self._layout.video))
        users = self._in_user_turns(tokens)
        return ThinkerPrompt(
            ids=expanded,
            axes=positions.axes,
            delta=positions.delta,
            heard_at=np.flatnonzero(audio),
            seen_at=np.flatnonzero(seen),
            wanted=np.flatnonzero((audio | seen) & users),
            user_grids=self._user_grids(grids, users[seen]),
            sound=sound,
            pictures=pictures,
        )

    def _in_user_turns(self, tokens: Any) -> Any:
        """Bool [n]: whether a position lies in a user turn, from its ``<|im_start|>`` up to the next one."""
        starts = np.flatnonzero(tokens == self._im_start)
        roles = tokens[np.minimum(starts + 1, len(tokens) - 1)] == self._user
        turn = np.cumsum(tokens == self._im_start) - 1
        return (turn >= 0) & roles[np.maximum(turn, 0)]

    def _placeholders(self, frames: int | None, grid: Grid | None, kind: str) -> list[int]:
        """What stands in the prompt for a medium of ``frames`` mel frames, a grid, or a video of both."""
        heard = [] if frames is None else [self._layout.audio] * audio_tokens(frames)
        if grid is None:
            return heard
        seen = [self._layout.image if kind == "image" else self._layout.video] * grid.tokens(self._layout.spatial_merge)
        if frames is None:
            return seen
        # A video's sound lies between its frames by time; at the same time the frame comes first.
        step = len(seen) // grid.time
        times = [place // step * grid.seconds * self._layout.per_second for place in range(len(seen))]
        both = sorted([(time, 0, token) for time, token in zip(times, seen, strict=True)]
                      + [(time, 1, token) for time, token in enumerate(heard)])  # fmt: skip
        first, last = self._sound_marks
        return [first, *(token for _, _, token in both), last]

    def _expanded(self, ids: Sequence[int], media: Sequence[list[int]]) -> list[int]:
        """Every placeholder id of the template replaced by what stands for its medium."""
        left, marks = iter(media), {self._layout.audio, self._layout.image, self._layout.video}
        out: list[int] = []
        for token in ids:
            out.extend(next(left) if token in marks else [token])
        return out

    def _user_grids(self, grids: Sequence[Grid], users: Any) -> tuple[Grid, ...]:
        """The grids of images and videos in user turns; ``users`` says so for each placeholder of theirs."""
        firsts = np.cumsum([0, *(grid.tokens(self._layout.spatial_merge) for grid in grids)])
        return tuple(grid for grid, first in zip(grids, firsts, strict=False) if users[first])


def _inside(positions: Any, start: int, stop: int) -> slice:
    """Which of ascending positions lie in ``start .. stop - 1``."""
    first, last = np.searchsorted(positions, (start, stop))
    return slice(int(first), int(last))


def _visual(prompt: ChatPrompt, part: MediaPart) -> ImageClip | VideoClip:
    return prompt.images[part.index] if part.kind == "image" else prompt.videos[part.index]
