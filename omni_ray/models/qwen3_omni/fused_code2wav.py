"""The codec's modules with fewer passes over its activations: biases, snakes, residual sums and pasts where they lie.

Drop-ins for transformers' modules in ``qwen3_omni_moe``, for a GPU: the same parameters, the same functions.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.functional import conv1d
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import (
    Qwen3OmniMoeCode2WavDecoderResidualUnit,
    Qwen3OmniMoeSnakeBeta,
)

from omni_ray.engine.kernels.snake import add_, snake


class FusedSnake(nn.Module):
    """``Qwen3OmniMoeSnakeBeta`` in one pass."""

    def __init__(self, upstream: Any) -> None:
        super().__init__()
        self.alpha, self.beta = upstream.alpha, upstream.beta

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T] -> [B, C, T]."""
        return snake(x, self.alpha, self.beta)


class FusedResidualUnit(nn.Module):
    """``Qwen3OmniMoeCode2WavDecoderResidualUnit`` whose first convolution is a ``CarryingConv``.

    The first snake writes behind room for the convolution's past, the second one adds its bias, and the last sum adds
    the second convolution's bias and the residual.
    """

    def __init__(self, upstream: Any) -> None:
        super().__init__()
        self.act1, self.conv1, self.act2, self.conv2 = upstream.act1, upstream.conv1, upstream.act2, upstream.conv2

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, T] -> [B, C, T]."""
        first, second = self.conv1.conv, self.conv2.conv
        whole = snake(x, self.act1.alpha, self.act1.beta, room=self.conv1.place.keep)
        self.conv1.complete(whole)
        y = conv1d(whole, first.weight, dilation=first.dilation)
        y = snake(y, self.act2.alpha, self.act2.beta, bias=first.bias)
        return add_(conv1d(y, second.weight).contiguous(), second.bias, x.contiguous())


def fuse(parent: nn.Module) -> None:
    """Replace the modules under ``parent``, whose convolutions carry already."""
    for name, child in list(parent.named_modules()):
        if isinstance(child, Qwen3OmniMoeCode2WavDecoderResidualUnit):
            _replace(parent, name, FusedResidualUnit(child))
    for name, child in list(parent.named_modules()):
        if isinstance(child, Qwen3OmniMoeSnakeBeta):
            _replace(parent, name, FusedSnake(child))


def _replace(parent: nn.Module, name: str, child: nn.Module) -> None:
    holder, _, last = name.rpartition(".")
    parent.get_submodule(holder).register_module(last, child)
