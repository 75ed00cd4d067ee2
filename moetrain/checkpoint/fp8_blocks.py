"""The released FP8 format: E4M3 weights with one fp32 multiplier per 128 x 128 block (DeepSeek-V3 README_WEIGHTS).

``weight_scale_inv`` is a multiplier despite its name: weight = block * scale_inv. The numbers are those of
``moetrain_kernels.quantise.blocks``; here stands what a file may get wrong.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moetrain_kernels.quantise import TILE, Quantised, blocks


def scale_shape(rows: int, columns: int) -> tuple[int, int]:
    """Shape of the multipliers of a [rows, columns] weight."""
    return -(-rows // TILE), -(-columns // TILE)


def dequantise(weight: Tensor, scale_inv: Tensor) -> Tensor:
    """fp32 [O, I] from E4M3 [O, I] and fp32 [ceil(O / 128), ceil(I / 128)]."""
    rows, columns = weight.shape
    if tuple(scale_inv.shape) != scale_shape(rows, columns):
        raise ValueError(
            f"scales are {list(scale_inv.shape)}, and a {rows} x {columns} weight has {scale_shape(rows, columns)}"
        )
    return Quantised(weight, scale_inv.to(torch.float32), (TILE, TILE)).dequantise()


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 [O, I] and fp32 multipliers, as DeepSeek's own utility makes them."""
    q = blocks(weight.to(torch.float32))
    return q.values, q.scale
