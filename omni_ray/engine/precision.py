"""Which number format a model computes in."""

import torch


def compute_dtype(option: str) -> torch.dtype:
    """``auto`` is bfloat16 where the CPU multiplies it natively (half the bytes per token), else float32."""
    if option == "auto":
        capabilities = torch.cpu.get_capabilities()
        native = any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
        option = "bfloat16" if native else "float32"
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[option]
