"""The tiny CSM checkpoint, and transformers' own answers on it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from omni_ray.models.csm.checkpoint import make_tiny

WORDS = "Ah, so it is."
Generate = Callable[..., NDArray[np.int64]]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("csm") / "tiny"
    make_tiny(path)
    return path


@pytest.fixture(scope="session")
def recording() -> NDArray[np.float32]:
    """0.9 s at 24 kHz: no whole number of frames."""
    noise = np.random.default_rng(3).standard_normal(21_600) * 0.1
    return noise.astype(np.float32)


@pytest.fixture(scope="session")
def upstream(tiny: Path) -> Any:
    from transformers import CsmForConditionalGeneration

    return CsmForConditionalGeneration.from_pretrained(tiny).eval()


@pytest.fixture(scope="session")
def generate(tiny: Path, upstream: Any) -> Generate:
    """``generate(text, frames, sound)``: greedy codes int64 [frames, codebooks] by upstream's processor and model.

    The stop frame, if there is one, is left out.
    """
    from transformers import CsmProcessor

    processor = CsmProcessor.from_pretrained(tiny)

    def run(text: str, frames: int, sound: NDArray[np.float32] | None = None, speaker: str = "0") -> NDArray[np.int64]:
        turn = f"[{speaker}]{text}"
        if sound is not None:
            turn = f"[{speaker}]{WORDS}<|end_of_text|><|AUDIO|><|audio_eos|><|begin_of_text|>{turn}"
        inputs = processor(turn, sound, add_special_tokens=True)
        with torch.no_grad():
            codes = upstream.generate(**inputs, do_sample=False, depth_decoder_do_sample=False, max_new_tokens=frames)[
                0
            ].numpy()
        ends = (codes[:, :-1] == upstream.config.codebook_eos_token_id).all(-1).nonzero()[0]
        return codes[: ends[0]] if len(ends) else codes

    return run
