"""Triton's interpreter, corrected: as shipped it multiplies bf16's raw bits and loses the carry of roundings to E4M3.

What ``triton.jit`` makes depends on the environment when triton is first imported: tests/conftest.py sets it.
"""

from __future__ import annotations

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

DTYPES = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32}
shipped = interpreter._convert_float


def convert(values, given, wanted, rounding):
    """By torch, whose conversions are right; PTX's to E4M3 saturate."""
    if given not in DTYPES or wanted not in DTYPES:
        return shipped(values, given, wanted, rounding)
    raw = np.frombuffer(np.ascontiguousarray(values).tobytes(), dtype=np.uint8).copy()
    x = torch.from_numpy(raw).view(DTYPES[given])
    if wanted == tl.float8e4nv:
        x = x.float()
        x = torch.where(x.isnan(), x, x.clamp(-448, 448))
    out = x.to(DTYPES[wanted]).view(torch.uint8).numpy()
    return out.view(UNSIGNED[wanted.primitive_bitwidth // 8]).reshape(values.shape)


def dot(self, a, b, acc, precision, imprecise):
    def wide(handle):
        if handle.dtype.scalar in (tl.bfloat16, tl.float8e4nv):
            return convert(handle.data, handle.dtype.scalar, tl.float32, None).view(np.float32)
        return handle.data

    product = np.matmul(wide(a), wide(b), dtype=acc.data.dtype) + acc.data
    return interpreter.TensorHandle(product, acc.dtype.scalar)


interpreter._convert_float = convert
interpreter.InterpreterBuilder.create_dot = dot
