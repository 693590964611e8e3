"""Triton's interpreter with right numbers: that of 3.6 cuts bits off where it rounds, or carries into a wrong exponent,
and multiplies the bits of bfloat16 as if they were integers.
"""

from typing import Any

import numpy as np
import torch
from triton.language import float32
from triton.runtime import interpreter

BITS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}


def convert(data: Any, source: Any, target: Any, rounding: Any) -> Any:
    """As ``interpreter._convert_float``: bits in, bits out; to the nearest number, and even ones between two."""
    types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8e4nv": torch.float8_e4m3fn}
    bits = np.ascontiguousarray(data).view(f"int{source.primitive_bitwidth}".replace("int8", "uint8"))
    numbers = torch.from_numpy(bits.copy()).view(types[source.name]).float().to(types[target.name])
    result = numbers.view(BITS[target.primitive_bitwidth]).numpy()
    return result.view(f"uint{target.primitive_bitwidth}")


def multiply(builder: Any, a: Any, b: Any, sums: Any, *_: Any) -> Any:
    """As ``InterpreterBuilder.create_dot``, in float32."""
    left, right = (
        x.data if x.dtype.scalar.name == "fp32" else convert(x.data, x.dtype.scalar, float32, None).view(np.float32)
        for x in (a, b)
    )
    return interpreter.TensorHandle(np.matmul(left, right) + sums.data, sums.dtype.scalar)


def repair() -> None:
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = multiply
