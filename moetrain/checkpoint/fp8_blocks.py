"""The released FP8 format: E4M3 weights with one fp32 multiplier per 128 x 128 block (DeepSeek-V3 README_WEIGHTS).

``weight_scale_inv`` is a multiplier despite its name: weight = block * scale_inv. Blocks at the ragged ends of a
matrix are smaller; they count as padded with zeros, which changes no scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
E4M3_MAX = 448.0


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the multipliers of a [rows, columns] weight."""
    return -(-rows // BLOCK), -(-columns // BLOCK)


def dequantise(weight: Tensor, scale_inv: Tensor) -> Tensor:
    """fp32 [O, I] from E4M3 [O, I] and fp32 [ceil(O / 128), ceil(I / 128)]."""
    rows, columns = weight.shape
    if tuple(scale_inv.shape) != scale_shape(rows, columns):
        raise ValueError(
            f"scales are {list(scale_inv.shape)}, and a {rows} x {columns} weight has {scale_shape(rows, columns)}"
        )
    return weight.to(torch.float32) * _spread(scale_inv.to(torch.float32), rows, columns)


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 [O, I] and fp32 multipliers: ``max(amax, 1e-4) / 448`` a block, as DeepSeek's own utility does it."""
    rows, columns = weight.shape
    high, wide = scale_shape(rows, columns)
    w = weight.to(torch.float32)
    padded = torch.nn.functional.pad(w, (0, wide * BLOCK - columns, 0, high * BLOCK - rows))
    amax = padded.view(high, BLOCK, wide, BLOCK).abs().amax(dim=(1, 3))
    scale = amax.clamp(min=1e-4) / E4M3_MAX
    return (w / _spread(scale, rows, columns)).to(torch.float8_e4m3fn), scale


def _spread(scale: Tensor, rows: int, columns: int) -> Tensor:
    return scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
