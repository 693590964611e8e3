"""The talker's weights as the kernels read them: projections of one input stacked, shared experts among the others.

Nothing is held twice: upstream's parameters become views of the stacks, so the modules go on working (prompts are
computed with them). Only a layer's shared expert is copied, because as two experts of the routed ones' width its rows
lie in another order.

The gains of norms are multiplied into the weights that follow, and become ones: the same model in other numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from omni_ray.engine.kernels.attention import HeadNorms
from omni_ray.engine.kernels.experts import Experts


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """``qkv`` [(heads + 2 groups) d, H], ``out`` [H, heads d]; ``eps`` of the norm before."""

    eps: float
    qkv: Tensor
    heads: HeadNorms
    out: Tensor
    scale: float


@dataclass(frozen=True, slots=True)
class PackedTalkerLayer:
    """One layer of the talker."""

    attention: PackedAttention
    experts: Experts


@dataclass(frozen=True, slots=True)
class PackedPredictorLayer:
    """A layer of the code predictor: ``up`` [2 I, H] (gate rows first), ``down`` [H, I], ``eps`` of the norm before."""

    attention: PackedAttention
    eps: float
    up: Tensor
    down: Tensor


def absorb(norm: Any, weights: Sequence[nn.Parameter]) -> float:
    """Multiply the gain of an RMS norm of transformers into weights [..., H] that it stands before; its epsilon."""
    gain = norm.weight.data.clone()
    norm.weight.data.fill_(1)
    for weight in weights:
        weight.data.mul_(gain)
    return float(norm.variance_epsilon)


def talker_layer(layer: Any) -> PackedTalkerLayer:
    """Pack a ``Qwen3OmniMoeTalkerDecoderLayer``; its modules are views afterwards."""
    block = layer.mlp
    routed, shared, width = block.experts, block.shared_expert, block.experts.intermediate_dim
    if shared.intermediate_size % width:
        raise ValueError(f"a shared expert {shared.intermediate_size} wide beside routed ones of {width}")
    before = (routed.gate_up_proj, block.gate.weight, block.shared_expert_gate.weight)
    eps = absorb(layer.post_attention_layernorm, [*before, shared.gate_proj.weight, shared.up_proj.weight])
    up, down = shared.gate_proj.weight.split(width), shared.down_proj.weight.split(width, 1)
    gates = zip(up, shared.up_proj.weight.split(width), strict=True)
    experts = Experts(
        router=_stack([block.gate.weight, block.shared_expert_gate.weight]),
        up=_extended(routed.gate_up_proj, [torch.cat(pair) for pair in gates]),
        down=_extended(routed.down_proj, [part.contiguous() for part in down]),
        chosen=block.gate.top_k,
        normalised=block.gate.norm_topk_prob,
        eps=eps,
    )
    return PackedTalkerLayer(_attention(layer), experts)


def predictor_layer(layer: Any) -> PackedPredictorLayer:
    """Pack a ``Qwen3OmniMoeTalkerCodePredictorDecoderLayer``; its modules are views afterwards."""
    eps = absorb(layer.post_attention_layernorm, [layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
    up = _stack([layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight])
    return PackedPredictorLayer(_attention(layer), eps, up, layer.mlp.down_proj.weight)


def _attention(layer: Any) -> PackedAttention:
    own = layer.self_attn
    if any(module.bias is not None for module in (own.q_proj, own.k_proj, own.v_proj, own.o_proj)):
        raise ValueError("attention with biases: the kernels have none")
    inputs = [own.q_proj.weight, own.k_proj.weight, own.v_proj.weight]
    return PackedAttention(
        absorb(layer.input_layernorm, inputs),
        _stack(inputs),
        HeadNorms(own.q_norm.weight, own.k_norm.weight, own.q_norm.variance_epsilon),
        own.o_proj.weight,
        own.scaling,
    )


def _stack(parameters: Sequence[nn.Parameter]) -> Tensor:
    """The rows of all; each becomes a view."""
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, rows in zip(parameters, torch.split(whole, [len(p) for p in parameters]), strict=True):
        parameter.data = rows
    return whole


def _extended(parameter: nn.Parameter, more: Sequence[Tensor]) -> Tensor:
    """``parameter`` [n, ...] and further entries; it becomes a view."""
    whole = torch.cat([parameter.data, torch.stack(list(more))])
    parameter.data = whole[: len(parameter)]
    return whole
