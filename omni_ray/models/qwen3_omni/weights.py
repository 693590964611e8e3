"""Random weights for Qwen3-Omni's routed experts, which upstream's own initialisation leaves out."""

import torch
from torch import nn


@torch.no_grad()
def initialise_experts(module: nn.Module, std: float, seed: int = 0) -> None:
    """Draw routed experts and routers from a normal distribution: what upstream's random init leaves out.

    transformers (5.17 to 5.24) leaves the talker's experts as uninitialised memory and its router at zero.

    Args:
        module: freshly built with transformers' own initialisation.
        std: standard deviation of the weights.
        seed: of a generator per parameter, so that the values depend on nothing else.
    """
    for number, (name, parameter) in enumerate(module.named_parameters()):
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj", ".mlp.gate.weight")):
            generator = torch.Generator(parameter.device).manual_seed(seed * 1_000_003 + number)
            parameter.normal_(0, std, generator=generator)
