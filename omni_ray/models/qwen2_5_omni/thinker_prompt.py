"""A chat prepared for the thinker: what transformers' ``Qwen2_5OmniProcessor`` does for text, sounds and images.

On ids instead of text: special tokens split the text around them, so both give the same ids.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from omni_ray.engine.chat_turns import refuse_long_sound, refuse_marks
from omni_ray.engine.transformers_media import Sounds
from omni_ray.engine.types import AudioClip, ImageClip
from omni_ray.models.qwen2_5_omni.media import TOKENS_PER_SECOND, MediaReader, Pictures, Towers, audio_tokens
from omni_ray.models.qwen2_5_omni.positions import ImageGrid, RopePositions, rope_positions
from omni_ray.models.qwen2_5_omni.prompt import CHAT_TEMPLATE, ChatPrompt

TEMPLATE_FILE: Final = "chat_template.json"
"""Where published checkpoints keep their chat template; tokenizers do not read it."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive positions of a prompt, t of them.

    Attributes:
        ids: token ids [t]. axes: float32 [3, t].
        media_at: int64 [m], which of them are placeholders. media: their rows [m, hidden], None if m is 0.
    """

    ids: Sequence[int]
    axes: Tensor
    media_at: Tensor
    media: Tensor | None


@dataclass(slots=True)
class ThinkerPrompt:
    """A ``Prepared`` prompt of n positions.

    Attributes:
        ids: token ids [n].
        rope: their positions.
        heard_at, seen_at: int64, positions of sound and image placeholders.
        grids: of the images.
        sounds, pictures: features, until ``perceive`` made ``media`` of them: rows of all placeholders, in order.
    """

    ids: list[int]
    rope: RopePositions
    heard_at: NDArray[np.int64]
    seen_at: NDArray[np.int64]
    grids: tuple[ImageGrid, ...] = ()
    sounds: Sounds | None = None
    pictures: Pictures | None = None
    media: Tensor | None = None

    def perceive(self, towers: Towers) -> None:
        """Hear and see what is in the prompt."""
        places = np.concatenate((self.heard_at, self.seen_at))
        rows = [] if self.sounds is None else [towers.hear(self.sounds)]
        rows += [] if self.pictures is None else [towers.see(self.pictures)]
        if rows:
            self.media = torch.cat(rows)[torch.from_numpy(places.argsort())]
        self.sounds = self.pictures = None

    def feature_bytes(self) -> int:
        """Bytes of what the towers made of its media."""
        return 0 if self.media is None else int(self.media.nbytes)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, piece: slice) -> Piece:
        start, stop, _ = piece.indices(len(self.ids))
        places = np.sort(np.concatenate((self.heard_at, self.seen_at)))
        first, last = (int(i) for i in np.searchsorted(places, (start, stop)))
        return Piece(
            ids=self.ids[start:stop],
            axes=torch.from_numpy(self.rope.axes[:, start:stop]),
            media_at=torch.from_numpy(places[first:last] - start),
            media=None if self.media is None or first == last else self.media[first:last],
        )


def chat_template(directory: Path, tokenizer: Any) -> str:
    """The checkpoint's own template, wherever it is, else ours."""
    if tokenizer.chat_template:
        return str(tokenizer.chat_template)
    path = directory / TEMPLATE_FILE
    return str(json.loads(path.read_text())["chat_template"]) if path.is_file() else CHAT_TEMPLATE


class PromptMaker:
    """Prepares chats; holds the tokenizer and the ids of the checkpoint's config."""

    def __init__(self, tokenizer: Any, template: str, config: Any, media: MediaReader, longest: int) -> None:
        """Take what preparing needs.

        Args:
            tokenizer: of the checkpoint.
            template: its chat template.
            config: transformers' ``Qwen2_5OmniThinkerConfig``.
            media: makes features.
            longest: positions that a prompt may have at most; sound beyond it is refused before it is computed.
        """
        self._tokenizer = tokenizer
        self._template = template
        self._media = media
        self._longest = longest
        self._audio, self._image = config.audio_token_index, config.image_token_index
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
        media = prompt.media()
        clips = [medium for medium in media if isinstance(medium, AudioClip)]
        images = [medium for medium in media if isinstance(medium, ImageClip)]
        sounds = self._media.sounds(clips) if clips else None
        pictures = self._media.pictures(images) if images else None
        grids = () if pictures is None else pictures.grids
        heard = iter([] if sounds is None else [audio_tokens(frames) for frames in sounds.frames.tolist()])
        seen = iter([grid.tokens for grid in grids])
        counts = iter([next(heard if isinstance(medium, AudioClip) else seen) for medium in media])
        ids = [
            token
            for token in self._tokenizer(text, add_special_tokens=False)["input_ids"]
            for _ in range(next(counts) if token in (self._audio, self._image) else 1)
        ]
        tokens = np.asarray(ids)
        return ThinkerPrompt(
            ids=ids,
            rope=rope_positions(ids, self._image, grids),
            heard_at=np.flatnonzero(tokens == self._audio),
            seen_at=np.flatnonzero(tokens == self._image),
            grids=grids,
            sounds=sounds,
            pictures=pictures,
        )
