"""Rotary position embedding (RoFormer, Su et al. 2021) in the halves layout of Llama and its descendants."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers' ``apply_rotary_pos_emb`` for one tensor, bit for bit.

    Args:
        x: [n, heads, t, d].
        cos: [n, t, d], of the positions.
        sin: [n, t, d].

    Returns:
        [n, heads, t, d].
    """
    left, right = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]
