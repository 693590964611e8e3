"""The tiny Qwen2.5-Omni checkpoint, made once per session, and transformers' own model of it, in one piece."""

from pathlib import Path
from typing import Any

import pytest
import torch

from omni_ray.models.qwen2_5_omni.checkpoint import make_tiny


@pytest.fixture(scope="session")
def tiny25(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("qwen2_5_omni") / "tiny"
    make_tiny(out)
    return out


@pytest.fixture(scope="session")
def upstream25(tiny25: Path) -> Any:
    """``Qwen2_5OmniForConditionalGeneration``, float32."""
    from transformers import Qwen2_5OmniForConditionalGeneration

    torch.set_num_threads(1)
    return Qwen2_5OmniForConditionalGeneration.from_pretrained(tiny25, dtype=torch.float32).eval()
