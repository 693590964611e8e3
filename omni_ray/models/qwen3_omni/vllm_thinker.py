"""The thinker computed by vLLM: what vLLM does not do. Imports no vLLM.

Upstream is vLLM's ``Qwen3OmniMoeThinkerForConditionalGeneration`` with its own processing of media; it loads the whole
checkpoint and skips talker and code2wav. Where a talker listens, ``vllm_rows`` keeps hidden rows for it.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from omni_ray.engine.types import Chunk, LatentChunk
from omni_ray.engine.vllm_model import VLLMCheckpoint, VLLMModel, VLLMPrompt
from omni_ray.engine.vllm_options import VLLMOptions
from omni_ray.errors import InvalidRequestError
from omni_ray.models.qwen3_omni.media import BLOCK_FRAMES
from omni_ray.models.qwen3_omni.prompt import ChatPrompt
from omni_ray.models.qwen3_omni.stage_checkpoint import stage_checkpoint
from omni_ray.models.qwen3_omni.thinker_prompt import ThinkerPrompt
from omni_ray.models.qwen3_omni.thinker_text import ThinkerText

MOST_MEDIA: Final = {"audio": 16, "image": 16, "video": 0}
"""In one prompt; as many as an ingress takes by default."""


class Qwen3OmniThinkerVLLM(VLLMModel):
    """``ChatPrompt`` in, text out, and what ``Qwen3OmniThinker`` gives out besides. Takes no videos.

    vLLM hears clip by clip, transformers all clips of a prompt at once: the last frames of clips that are shorter than
    another one, or no whole number of frames, differ a little.
    """

    def load(self) -> VLLMCheckpoint:
        """See ``VLLMModel.load``."""
        options = self.context.options
        assert isinstance(options, VLLMOptions)
        directory, config = stage_checkpoint(self.context, lambda whole: whole.thinker_config.text_config, speaks=False)
        self._text = ThinkerText(directory, config, options.max_model_len)
        self.stop_ids = self._text.stop_ids
        thinker = config.thinker_config
        self._placeholders = (thinker.audio_token_id, thinker.image_token_id)
        heard = self._text.capture is not None
        architecture = "Qwen3OmniThinkerWithRows" if heard else "Qwen3OmniThinkerWithPositions"
        return VLLMCheckpoint(directory, architecture, MOST_MEDIA, keeps_rows=heard)

    def encode(self, prompt: Any) -> VLLMPrompt:
        """See ``VLLMModel.encode``."""
        assert isinstance(prompt, ChatPrompt)
        if prompt.videos:
            raise InvalidRequestError("this server's thinker takes no videos", "messages")
        made = self._text.encode(prompt)
        parts = prompt.media()
        media: dict[str, Sequence[Any]] = {
            "audio": [] if made.sound is None else _sounds(prompt, made.sound.frames.tolist()),
            "image": [prompt.images[part.index].pixels for part in parts if part.kind == "image"],
        }
        return VLLMPrompt(
            ids=made.ids,
            given=self._collapsed(made),
            media={kind: items for kind, items in media.items() if items},
            wanted=made.wanted if self._text.capture is not None else made.wanted[:0],
            source=made,
        )

    def detokenize(self, token_id: int) -> bytes:
        """See ``VLLMModel.detokenize``."""
        return self._text.detokenize(token_id)

    def prompt_outputs(self, prompt: VLLMPrompt, rows: NDArray[np.float32] | None, limit: int) -> Sequence[Chunk]:
        """See ``VLLMModel.prompt_outputs``."""
        count = 0 if rows is None else len(rows)
        asked = replace(self._text.asked(prompt.source, count), limit=limit)
        return [asked] if rows is None else [asked, LatentChunk(0, rows, ends_segment=True)]

    def _collapsed(self, prompt: ThinkerPrompt) -> list[int]:
        """One placeholder for each medium: marks stand between any two media."""
        ids = np.asarray(prompt.ids)
        again = np.isin(ids[1:], self._placeholders) & (ids[1:] == ids[:-1])
        collapsed: list[int] = ids[np.concatenate(([True], ~again))].tolist()
        return collapsed


def _sounds(prompt: ChatPrompt, frames: Sequence[int]) -> list[tuple[NDArray[np.float32], int]]:
    """All clips as vLLM takes them: samples, and their rate.

    Each is cut, or followed by silence, to the mel frames that transformers would make of it: vLLM rounds them up.
    """
    clips = [prompt.clips[part.index] for part in prompt.media() if part.kind == "audio"]
    sounds = []
    for clip, count in zip(clips, frames, strict=True):
        samples = count * clip.sample_rate // BLOCK_FRAMES
        sounds.append((np.pad(clip.samples[:samples], (0, max(0, samples - len(clip.samples)))), clip.sample_rate))
    return sounds
