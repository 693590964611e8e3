"""On PYTHONPATH only for ``make vllm``: lets torchvision's usual build be imported beside torch for CPUs.

vLLM for CPUs requires a torchvision whose wheel is built for CUDA. Its library does not load there, and its Python part
then fails on two operators that nobody calls. Declaring them is enough for transformers' image processors. Every
process needs it, vLLM's own too, so it cannot be a fixture.
"""

import importlib.abc
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares the operators when torchvision is about to be imported, and finds nothing itself."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "torchvision":
            import torch

            sys.meta_path.remove(self)
            self.declared = torch.library.Library("torchvision", "FRAGMENT")  # gone with its last reference
            for operator in ("nms", "qnms"):
                self.declared.define(f"{operator}(Tensor a, Tensor b, float c) -> Tensor")
            KEPT.append(self)
        return None


KEPT: list[_BeforeTorchvision] = []
sys.meta_path.insert(0, _BeforeTorchvision())
