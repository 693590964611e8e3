"""The captured codec against transformers' one call, at the published shape in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3OmniMoeConfig
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from omni_ray.engine.transformers_build import build

LENGTHS = (91, 40, 133)
CHUNKS = (4, 8, 16, 25)


def models(directory: Path) -> tuple[Any, Any]:
    """Twice the same model; its sound is neither silent nor clamped."""
    config = Qwen3OmniMoeConfig.from_pretrained(directory).code2wav_config
    with torch.device("cuda"):
        torch.manual_seed(0)
        ours, upstream = (build(Qwen3OmniMoeCode2Wav, config, torch.float32, initialise=True) for _ in range(2))
    last = ours.decoder[-1].conv
    last.weight.mul_(2.0**-10)
    last.weight.mul_(0.1 / ours(codes(1, 40, 9)).std())
    upstream.load_state_dict(ours.state_dict())
    return ours.requires_grad_(False), upstream.requires_grad_(False)


def codes(rows: int, frames: int, seed: int) -> torch.Tensor:
    return torch.randint(2048, (rows, 16, frames), generator=torch.Generator().manual_seed(seed)).cuda()


def test_streams_in_a_crowd_equal_one_call(published: Path) -> None:
    """Three requests, one after another in a slot or beside each other, in chunks that the graphs' sizes do not fit."""
    from omni_ray.models.qwen3_omni.captured_code2wav import CapturedCode2Wav  # needs Triton

    ours, upstream = models(published)
    torch.backends.cudnn.allow_tf32 = False
    given = [codes(1, length, length) for length in LENGTHS]
    whole = [upstream(each)[0, 0].cpu().numpy() for each in given]
    decoder = CapturedCode2Wav(ours, slots=2, rows=2, chunk_frames=CHUNKS, tf32=False)
    decoder.capture([(1, 4), (1, 25), (2, 25)])
    random = np.random.default_rng(0)
    left = [each[0].T.cpu().numpy() for each in given]
    sound: list[list[np.ndarray]] = [[], [], []]
    pasts: dict[int, Any] = {0: None, 1: None}
    while pasts:
        mine = list(pasts)
        chunks = [left[i][: random.integers(1, 26)] for i in mine]
        done = decoder.step([pasts[i] for i in mine], chunks)
        for i, chunk, (samples, past) in zip(mine, chunks, done, strict=True):
            sound[i].append(samples)
            left[i], pasts[i] = left[i][len(chunk) :], past
            if not len(left[i]):
                decoder.release(pasts.pop(i))
                if 2 not in pasts and not sound[2]:
                    pasts[2] = None
    for parts, expected in zip(sound, whole, strict=True):
        made = np.concatenate(parts)
        assert made.shape == expected.shape
        assert expected.std() > 0.01
        assert np.abs(expected).max() < 1
        assert np.abs(made - expected).max() <= 1e-5 * np.abs(expected).max()
