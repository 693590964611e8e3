"""Tests that need a GPU, at the published shape with random weights; skipped where there is none."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from omni_ray.models.qwen3_omni.checkpoint import PUBLISHED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reasons = []
    if not torch.cuda.is_available():
        reasons.append("there is no GPU here")
    if importlib.util.find_spec("triton") is None:
        reasons.append("Triton is not installed")
    for item in items:
        if reasons and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="; ".join(reasons)))


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with the published configuration, for ``load_format: dummy``."""
    directory = tmp_path_factory.mktemp("published")
    (directory / "config.json").write_text(json.dumps(json.loads(PUBLISHED.read_text())))
    return directory


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield
    torch.cuda.empty_cache()
