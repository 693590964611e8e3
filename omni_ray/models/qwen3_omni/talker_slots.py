"""What the talker's frames read and write, in plain torch and in CUDA graphs alike."""

from dataclasses import dataclass

import torch
from torch import Tensor

from omni_ray.engine.kv_table import KVTable

RowInput = tuple[int, int, int, int, float]
"""What a row of a frame takes in: slot, text token, frame number, place in the cache, rope position."""


@dataclass(frozen=True, slots=True)
class SlotTables:
    """What a frame reads and writes of slots.

    Attributes:
        keys, values: of all layers and slots.
        last: [slots, H], the sum of the last frame's embeddings.
        said: bool [slots, V], codes of codebook 0 said so far.
        suppressed: bool [V], ids of codebook 0 that are never drawn.
        text: [tokens, H], projected text embeddings.
    """

    keys: KVTable
    values: KVTable
    last: Tensor
    said: Tensor
    suppressed: Tensor
    text: Tensor

    @classmethod
    def empty(cls, keys: KVTable, values: KVTable, suppressed: Tensor, text: Tensor) -> "SlotTables":
        """Of as many slots as ``keys`` has; nothing is said yet."""
        slots = keys.numbers.shape[1]
        last = text.new_zeros(slots, text.shape[1])
        said = torch.zeros(slots, len(suppressed), dtype=torch.bool, device=text.device)
        return cls(keys, values, last, said, suppressed, text)
