"""The talker's prompt as it computes it: text ids, the turn before with its code frames, and their embeddings.

Frames are embedded as upstream's ``_merge_input_ids_with_input_values`` does, text as plain text: what a client
writes never becomes a control token.
"""

from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from omni_ray.errors import ConfigError
from omni_ray.models.csm.prompt import BEGIN, END


@dataclass(frozen=True, slots=True)
class PromptRows:
    """A piece of a prepared prompt, or all of it: what ``SlotModel.encode`` gives.

    Attributes:
        embeds: [n, hidden], without the prompt's last position.
        last: [hidden], that last one: step 0 begins with it, as each later step with the frame before.
        units: tokens of the text to speak.
    """

    embeds: Tensor
    last: Tensor
    units: int

    def __len__(self) -> int:
        return len(self.embeds)

    def __getitem__(self, piece: slice) -> "PromptRows":
        return PromptRows(self.embeds[piece], self.last, self.units)


@dataclass(frozen=True, slots=True)
class TurnIds:
    """Makes the text ids of a turn.

    Attributes:
        tokenizer: of the checkpoint, a fast tokenizer of transformers.
        begin, end: ids around every turn's text.
    """

    tokenizer: Any
    begin: int
    end: int

    @classmethod
    def of(cls, tokenizer: Any, directory: object) -> Self:
        """From a checkpoint's tokenizer.

        Raises:
            ConfigError: it does not know ``<|begin_of_text|>`` or ``<|end_of_text|>``.
        """
        known = tokenizer.get_vocab()
        missing = [token for token in (BEGIN, END) if token not in known]
        if missing:
            raise ConfigError([f"{directory}: the tokenizer lacks {' and '.join(missing)}"])
        return cls(tokenizer, known[BEGIN], known[END])

    def __call__(self, speaker: str, text: str) -> list[int]:
        """Ids of one turn."""
        return [self.begin, *self.plain(f"[{speaker}]{text}"), self.end]

    def plain(self, text: str) -> list[int]:
        """Ids of text in which nothing is a control token."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return ids
