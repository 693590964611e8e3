"""The tiny checkpoint, made once per session, and transformers' own model of it, in one piece."""

from pathlib import Path
from typing import Any

import pytest
import torch

from omni_ray.models.qwen3_omni.checkpoint import make_tiny


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("qwen3_omni") / "tiny"
    make_tiny(out)
    return out


@pytest.fixture(scope="session")
def upstream(tiny_checkpoint: Path) -> Any:
    """``Qwen3OmniMoeForConditionalGeneration``, float32, greedy unless a test says otherwise."""
    from transformers import Qwen3OmniMoeForConditionalGeneration

    torch.set_num_threads(1)
    return Qwen3OmniMoeForConditionalGeneration.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()
