"""The talker's prompt: which of the thinker's prompt it keeps, and how text and codec sides are laid over each other.

As transformers' ``Qwen3OmniMoeForConditionalGeneration.generate`` builds it. User turns are kept whole, system and
earlier assistant turns dropped; nine positions follow, each the sum of a text side and a codec side:

    text    im_start  assistant  newline  pad      pad        pad        pad      bos  first generated token
    codec   -         -          -        nothink  think_bos  think_eos  speaker  pad  bos

The ninth is no part of ``TalkerIds``: it needs a generated token, so it is the talker's first step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from omni_ray.engine.ar_model import PREFILL_CHUNK, Probe
from omni_ray.errors import InvalidRequestError, StageFailedError
from omni_ray.models.qwen3_omni.positions import RopeLayout, RopePositions, rope_positions
from omni_ray.models.qwen3_omni.talker_input import TalkerPrompt, TalkerText

HEADER: Final = 3
"""Positions of ``<|im_start|>assistant\\n``."""


@dataclass(frozen=True, slots=True)
class Markers:
    """Ids of a checkpoint's config that prompts are cut and laid out by; text ids unless named ``codec``.

    Attributes:
        codec_head: nothink, think_bos, think_eos.
        rope: placeholders, and what else positions depend on.
    """

    im_start: int
    system: int
    user: int
    assistant: int
    tts_pad: int
    tts_bos: int
    tts_eos: int
    codec_head: tuple[int, int, int]
    codec_pad: int
    codec_bos: int
    rope: RopeLayout

    @classmethod
    def of(cls, config: Any) -> "Markers":
        """From transformers' ``Qwen3OmniMoeConfig``."""
        talker = config.talker_config
        rope = RopeLayout(
            audio=talker.audio_token_id,
            image=talker.image_token_id,
            video=talker.video_token_id,
            per_second=talker.position_id_per_seconds,
            spatial_merge=config.thinker_config.vision_config.spatial_merge_size,
        )
        return cls(
            im_start=config.im_start_token_id,
            system=config.system_token_id,
            user=config.user_token_id,
            assistant=config.assistant_token_id,
            tts_pad=config.tts_pad_token_id,
            tts_bos=config.tts_bos_token_id,
            tts_eos=config.tts_eos_token_id,
            codec_head=(talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id),
            codec_pad=talker.codec_pad_id,
            codec_bos=talker.codec_bos_id,
            rope=rope,
        )


@dataclass(frozen=True, slots=True)
class TalkerIds:
    """The talker's prompt in ids, without its last position.

    Attributes:
        text: thinker ids [n] of the text side; placeholders stand where a hidden row belongs.
        media: indices in ``text`` of those placeholders.
        codec: talker ids of the codec side of the last positions.
        rope: positions of all ``n + 1``.
    """

    text: tuple[int, ...]
    media: tuple[int, ...]
    codec: tuple[int, ...]
    rope: RopePositions


def talker_ids(prompt: TalkerPrompt, speaker: int, markers: Markers) -> TalkerIds:
    """Cut and lay out a prompt.

    Args:
        prompt: see ``TalkerPrompt``.
        speaker: codec id.
        markers: of the checkpoint.

    Raises:
        InvalidRequestError: a turn has a role that the checkpoint does not know (transformers drops it silently).
        StageFailedError: the prompt does not end in an assistant's line, or media rows or grids do not fit it.
    """
    users, last = _turns(prompt.prompt_ids, markers)
    header = prompt.prompt_ids[last : last + HEADER]
    if last < 0 or len(header) != HEADER:
        raise StageFailedError("the prompt ends without an assistant's turn to speak")
    text = (*users, *header, *[markers.tts_pad] * 4, markers.tts_bos)
    places = {markers.rope.audio, markers.rope.image, markers.rope.video}
    media = tuple(i for i, token in enumerate(users) if token in places)
    rows = 0 if prompt.media_rows is None else len(prompt.media_rows)
    if rows != len(media):
        raise StageFailedError(f"the user turns have {len(media)} media positions, {rows} hidden rows came")
    # Upstream computes positions with padding in place of the whole assistant's turn.
    ids = (*users, *[markers.tts_pad] * (len(text) - len(users) + 1))
    try:
        rope = rope_positions(ids, prompt.grids, markers.rope)
    except ValueError as error:
        raise StageFailedError(f"images or videos do not fit the prompt: {error}") from error
    return TalkerIds(text, media, (*markers.codec_head, speaker, markers.codec_pad), rope)


def _turns(ids: Sequence[int], markers: Markers) -> tuple[list[int], int]:
    """All ids of user turns, and where the last assistant turn begins (-1: nowhere)."""
    starts = [i for i, token in enumerate(ids) if token == markers.im_start]
    users: list[int] = []
    last = -1
    for start, end in zip(starts, [*starts[1:], len(ids)], strict=True):
        role = ids[start + 1] if start + 1 < len(ids) else None
        if role == markers.user:
            users.extend(ids[start:end])
        elif role == markers.assistant:
            last = start
        elif role != markers.system:
            raise InvalidRequestError("this model speaks after system, user and assistant messages only", "messages")
    return users, last


def media_tensor(prompt: TalkerPrompt, like: Tensor) -> Tensor:
    """The prompt's hidden rows [m, thinker hidden] on the device and in the dtype of ``like``."""
    assert prompt.media_rows is not None
    return torch.from_numpy(np.ascontiguousarray(prompt.media_rows)).to(like)


def probes(markers: Markers, room: int, vocabulary: int) -> list[Probe]:
    """For the self-test: four prompts of different lengths, at most ``room``, one of them longer than a piece."""
    turn = (markers.im_start, markers.assistant, markers.tts_pad)
    meaning = {markers.im_start, markers.rope.audio, markers.rope.image, markers.rope.video}

    def plain(first: int) -> tuple[int, ...]:
        """Ids that mean nothing to the prompt's layout."""
        return tuple(i for i in range(1, vocabulary)[first : first + 512] if i not in meaning)

    sizes = [min(size, max(room, 1)) for size in (3, PREFILL_CHUNK + 9, 17, 40)]
    return [
        Probe(
            TalkerPrompt((markers.im_start, markers.user, *plain(size)[:size], *turn)),
            (TalkerText(plain(2 * size)[:8]),),
        )
        for size in sizes
    ]
