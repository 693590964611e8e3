"""Token2wav's diffusion: from noise to a mel spectrogram, along an ordinary differential equation.

What transformers' ``Qwen2_5OmniToken2WavDiTModel.sample`` computes, from noise that the caller brings; upstream draws
it from torch's global generator. Flow matching (Lipman et al. 2023) with classifier-free guidance (Ho and Salimans
2022) and sway sampling (F5-TTS, Chen et al. 2024); network and solver are upstream's.
"""

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import RungeKutta4ODESolver

from omni_ray.engine.noise import normal

GUIDANCE: Final = 0.5
SWAY: Final = -1.0
"""Defaults of upstream's ``forward``."""

CODEBOOK: Final = 1
"""Of the noise: codebook 0 is what the talker draws its codes by."""


def start_noise(seed: int, frames: int, bins: int) -> NDArray[np.float32]:
    """Standard normals [frames, bins], a function of the request's seed: see ``engine.noise``."""
    return normal(seed, np.arange(frames)[:, None], CODEBOOK, np.arange(bins)[None])


def mel_of(dit: Any, codes: Tensor, cond: Tensor, ref_mel: Tensor, noise: Tensor, num_steps: int) -> Tensor:
    """The mel spectrogram [1, bins, frames] of an answer's codes.

    Args:
        dit: upstream's module.
        codes: int64 [1, n]; a code is ``dit.repeats`` mel frames.
        cond: float32 [1, enc_emb_dim], of the speaker.
        ref_mel: float32 [1, frames, bins], of the speaker.
        noise: float32 [1, n * repeats, bins].
        num_steps: points in time, both ends included.
    """
    speaker = cond[:, None].expand(-1, noise.shape[1], -1)

    def velocity(time: Tensor, mel: Tensor) -> Tensor:
        both = dit(
            hidden_states=mel,
            speaker_embedding=speaker,
            condition_vector=ref_mel,
            quantized_code=codes,
            time_step=time,
            apply_cfg=True,
        )
        guided, free = both.chunk(2)
        ahead: Tensor = guided + (guided - free) * GUIDANCE
        return ahead

    times = torch.linspace(0, 1, num_steps, device=noise.device)
    times = times + SWAY * (torch.cos(torch.pi / 2 * times) - 1 + times)
    path: Tensor = RungeKutta4ODESolver(velocity, noise).integrate(times)
    return path[-1].transpose(1, 2)
