"""Quantisation to E4M3 with one scale for each tile or block: what DeepSeek-V3's FP8 recipe is made of (3.3.2).

Activations and gradients have a scale for 128 neighbours of a row (``tiles``), or of a column where a weight's gradient
sums over tokens (``columns``); weights have one for 128 x 128 (``blocks``). Scales come from the largest magnitude
itself, without a history. Sizes that 128 does not divide count as padded with zeros, which changes no scale.

Numbers as in DeepSeek's own utility: ``scale = max(amax, 1e-4) / 448``, ``q = x / scale``; with ``power_of_two`` the
scale is rounded up to a power of two (dispatch, and Blackwell's format). These are the exact reference, in plain torch.

Legend: R rows, C columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 128
E4M3_MAX = 448.0
SMALLEST = 1e-4  # an amax below counts as this, so that a tile of zeros has a scale


class Quantised(NamedTuple):
    """E4M3 values [R, C], and the multipliers that bring them back, fp32, one for each ``tile`` = (rows, columns)."""

    values: Tensor
    scale: Tensor
    tile: tuple[int, int]

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[R, C]; products are taken in fp32 at least."""
        R, C = self.values.shape
        return self.values.to(dtype) * _spread(self.scale.to(dtype), self.tile, R, C)


def quantise(x: Tensor, tile: tuple[int, int], *, power_of_two: bool = False) -> Quantised:
    """x [R, C] in tiles of any size; its dtype is fp32 or less precise, or float64, which is rounded once.

    Values that are not finite stay so: infinite ones make their tile's scale infinite, and with it every value of the
    tile NaN, so that the step's verdict sees them.
    """
    R, C = x.shape
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    high, wide = -(-R // tile[0]), -(-C // tile[1])
    padded = F.pad(x, (0, wide * tile[1] - C, 0, high * tile[0] - R))
    amax = padded.view(high, tile[0], wide, tile[1]).abs().amax(dim=(1, 3))
    scale = amax.clamp(min=SMALLEST) / E4M3_MAX
    if power_of_two:
        scale = torch.exp2(torch.log2(scale).ceil())
    scale = scale.to(torch.float32)
    q = (x / _spread(scale.to(x.dtype), tile, R, C)).to(torch.float8_e4m3fn)
    return Quantised(q, scale, tile)


def tiles(x: Tensor, *, power_of_two: bool = False) -> Quantised:
    """A scale for 128 neighbours of a row: Fprop's and Dgrad's activations and gradients."""
    return quantise(x, (1, TILE), power_of_two=power_of_two)


def columns(x: Tensor, *, power_of_two: bool = False) -> Quantised:
    """A scale for 128 neighbours of a column: Wgrad's operands, which are summed over rows."""
    return quantise(x, (TILE, 1), power_of_two=power_of_two)


def blocks(w: Tensor, *, power_of_two: bool = False) -> Quantised:
    """A scale for 128 x 128: weights."""
    return quantise(w, (TILE, TILE), power_of_two=power_of_two)


def _spread(scale: Tensor, tile: tuple[int, int], R: int, C: int) -> Tensor:
    rows = scale if tile[0] == 1 else scale.repeat_interleave(tile[0], 0)[:R]
    return rows if tile[1] == 1 else rows.repeat_interleave(tile[1], 1)[:, :C]
