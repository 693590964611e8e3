"""Tests that need a GPU, at the published shape with random weights; skipped where there is none.

Those that take ``device`` run on a CPU too, in Triton's interpreter: ``TRITON_INTERPRET=1 pytest tests/gpu``.
"""

import importlib.util
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from omni_ray.models.qwen3_omni.checkpoint import PUBLISHED

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        reasons = []
        if device_of_kernels() == "cpu" and not (INTERPRETED and "device" in item.fixturenames):  # type: ignore[attr-defined]
            reasons.append("there is no GPU here")
        if importlib.util.find_spec("triton") is None:
            reasons.append("Triton is not installed")
        if reasons:
            item.add_marker(pytest.mark.skip(reason="; ".join(reasons)))


def device_of_kernels() -> str:
    return "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"


@pytest.fixture
def device() -> str:
    """Where kernels run."""
    if INTERPRETED:
        from interpreted import repair

        repair()
    return device_of_kernels()


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
