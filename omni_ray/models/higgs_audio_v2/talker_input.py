"""The talker's prompt as it computes it: text ids as upstream's chat template makes them, and rows of codes.

What a client writes never becomes a control token; upstream's processor takes it for one.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from omni_ray.errors import ConfigError
from omni_ray.models.higgs_audio_v2.prompt import ASSISTANT, AUDIO_BEGIN, AUDIO_END, SYSTEM, TURN_END, USER


@dataclass(frozen=True, slots=True)
class PromptRows:
    """A piece of a prepared prompt, or all of it: what ``SlotModel.encode`` gives.

    Attributes:
        embeds: [n, hidden], without the prompt's last position.
        sound: bool [n], which of them are sound.
        last: [hidden], that last one, a row of begin codes: step 0 begins with it, as each later step with the row
            before.
        units: tokens of the text to speak.
    """

    embeds: Tensor
    sound: Tensor
    last: Tensor
    units: int

    def __len__(self) -> int:
        return len(self.embeds)

    def __getitem__(self, piece: slice) -> "PromptRows":
        return PromptRows(self.embeds[piece], self.sound[piece], self.last, self.units)


@dataclass(frozen=True, slots=True)
class ChatIds:
    """Makes the text ids of a prompt.

    Attributes:
        tokenizer: of the checkpoint, a fast tokenizer of transformers.
    """

    tokenizer: Any

    @classmethod
    def of(cls, tokenizer: Any, directory: object) -> Self:
        """From a checkpoint's tokenizer.

        Raises:
            ConfigError: it does not know the tokens that a prompt is made of.
        """
        known = tokenizer.get_vocab()
        missing = [token for token in (AUDIO_BEGIN, AUDIO_END, TURN_END, tokenizer.bos_token) if token not in known]
        if missing:
            raise ConfigError([f"{directory}: the tokenizer lacks {', '.join(map(str, missing))}"])
        return cls(tokenizer)

    def before_sound(self, text: str, first: bool) -> list[int]:
        """A user's turn and the head of the answer; ``first`` puts the system turn before it."""
        head = f"{self.tokenizer.bos_token}{SYSTEM}{USER}" if first else f"{AUDIO_END}{TURN_END}{USER}"
        return [*self._own(head), *self.plain(f"\n\n{text.strip()}"), *self._own(ASSISTANT)]

    def plain(self, text: str) -> list[int]:
        """Ids of text in which nothing is a control token."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return ids

    def _own(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids


def joined(parts: list[tuple[Tensor, bool]], last: Tensor, units: int) -> PromptRows:
    """A prompt of parts [n, hidden], each with whether it is sound."""
    sound = torch.cat([torch.full((len(part),), is_, device=part.device) for part, is_ in parts])
    return PromptRows(torch.cat([part for part, _ in parts]), sound, last, units)
