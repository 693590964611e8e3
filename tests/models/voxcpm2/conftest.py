"""The package ``voxcpm`` for tests: opt-in, because it wants torchaudio, librosa and numba, which CI does not install.

``OMNI_RAY_TEST_VOXCPM`` names a directory with the package and what it needs, for instance of
``pip install --no-deps --target DIR voxcpm==2.0.3 torchaudio einops librosa lazy_loader audioread numba llvmlite joblib
cloudpickle decorator pooch`` (beside a torch without CUDA, delete ``torchaudio/lib`` in it).
"""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def voxcpm_path() -> str:
    path = os.environ.get("OMNI_RAY_TEST_VOXCPM")
    if not path:
        pytest.skip("needs the package voxcpm; OMNI_RAY_TEST_VOXCPM names no directory that holds it")
    return path


@pytest.fixture(scope="session")
def tiny(voxcpm_path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint; meanwhile the package can be imported in this process."""
    from omni_ray.models.voxcpm2.checkpoint import make_tiny

    sys.path.append(voxcpm_path)
    out = tmp_path_factory.mktemp("vox") / "tiny"
    make_tiny(out)
    yield out
    sys.path.remove(voxcpm_path)
