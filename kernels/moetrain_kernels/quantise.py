"""Quantisation to E4M3 with one scale for each tile or block: what DeepSeek-V3's FP8 recipe is made of (3.3.2).

Activations and gradients have a scale for 128 neighbours of a row (``tiles``), or of a column where a weight's gradient
sums over tokens (``columns``); weights have one for 128 x 128 (``blocks``). Scales come from the largest magnitude
itself, without a history. Sizes that 128 does not divide count as padded with zeros, which changes no scale.

Numbers as in DeepSeek's own utility: ``scale = max(amax, 1e-4) / 448``, ``q = x / scale``; with ``power_of_two`` the
scale is rounded up to a power of two (dispatch, and Blackwell's format). Not so for gradients: those of a mean loss
shrink as the global batch grows, and with that floor of 1e-4 they would lose bits by its size, down to none. Theirs is
the smallest that keeps scales normal numbers, ``GRADIENTS``. These are the exact reference, in plain torch.

``e5m6`` is the one other format: what V3 keeps of the attention's output for the backward, 12 bits a value (3.3.3).

Legend: R rows, C columns.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 128
E4M3_MAX = 448.0
E5M6_MAX = 65024.0
ACTIVATIONS = 1e-4  # floors: an amax below counts as this, so that a tile of zeros has a scale
GRADIENTS = 1e-30


class Quantised(NamedTuple):
    """E4M3 values [..., R, C], and what brings them back: fp32 factors, one for each ``tile`` = (rows, columns)."""

    values: Tensor
    scale: Tensor
    tile: tuple[int, int]

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[..., R, C]; products are taken in fp32 at least."""
        R, C = self.values.shape[-2:]
        return self.values.to(dtype) * _spread(self.scale.to(dtype), self.tile, R, C)

    def rows(self, row_N: Tensor) -> Quantised:
        """These rows of [R, C], which tiles of one row allow."""
        values = self.values.view(torch.uint8).index_select(0, row_N).view(self.values.dtype)
        return Quantised(values, self.scale.index_select(0, row_N), self.tile)


def quantise(x: Tensor, tile: tuple[int, int], *, power_of_two: bool = False, floor: float = ACTIVATIONS) -> Quantised:
    """x [..., R, C] in tiles of any size; its dtype is fp32 or less precise, or float64, which is rounded once.

    Values that are not finite stay so: infinite ones make their tile's scale infinite, and with it every value of the
    tile NaN, so that the step's verdict sees them.
    """
    R, C = x.shape[-2:]
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    high, wide = -(-R // tile[0]), -(-C // tile[1])
    padded = F.pad(x, (0, wide * tile[1] - C, 0, high * tile[0] - R))
    amax = padded.view(*x.shape[:-2], high, tile[0], wide, tile[1]).abs().amax(dim=(-3, -1))
    scale = amax.clamp(min=floor) / E4M3_MAX
    if power_of_two:
        scale = _power_of_two(scale)
    scale = scale.to(torch.float32)
    q = (x / _spread(scale.to(x.dtype), tile, R, C)).to(torch.float8_e4m3fn)
    return Quantised(q, scale, tile)


def _power_of_two(scale: Tensor) -> Tensor:
    """The next one up; by the exponent, since a logarithm near one is rounded to it."""
    mantissa, exponent = torch.frexp(scale)  # in [0.5, 1)
    up = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
    return torch.where(scale.isfinite(), up, scale)


def tiles(x: Tensor, *, power_of_two: bool = False, floor: float = ACTIVATIONS) -> Quantised:
    """A scale for 128 neighbours of a row: Fprop's and Dgrad's activations and gradients."""
    return quantise(x, (1, TILE), power_of_two=power_of_two, floor=floor)


def columns(x: Tensor, *, power_of_two: bool = False, floor: float = ACTIVATIONS) -> Quantised:
    """A scale for 128 neighbours of a column: Wgrad's operands, which are summed over rows."""
    return quantise(x, (TILE, 1), power_of_two=power_of_two, floor=floor)


def blocks(w: Tensor, *, power_of_two: bool = False) -> Quantised:
    """A scale for 128 x 128: weights."""
    return quantise(w, (TILE, TILE), power_of_two=power_of_two)


class E5M6(NamedTuple):
    """1 + 5 + 6 bits a value, two values in three bytes: [R, C * 3 / 2]; a power of two as scale for 128 of a row."""

    packed: Tensor
    scale: Tensor
    columns: int

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[R, C]."""
        first, middle, last = self.packed.view(self.packed.shape[0], -1, 3).to(torch.int32).unbind(-1)
        twelve = torch.stack([first << 4 | middle >> 4, (middle & 15) << 8 | last], dim=-1).flatten(1)
        # sign, exponent and the six bits are the upper twelve of an fp16
        signed = torch.where(twelve >= 2048, twelve - 4096, twelve) << 4
        values = signed.to(torch.int16).view(torch.float16)[:, : self.columns].to(dtype)
        return values * _spread(self.scale.to(dtype), (1, TILE), *values.shape)


def e5m6(x: Tensor) -> E5M6:
    """x [R, C] with a power of two for each 128 of a row; rounded to nearest, ties to even."""
    R, C = x.shape
    x = x.to(torch.float32)
    wide = -(-C // TILE)
    amax = F.pad(x, (0, wide * TILE - C)).view(R, wide, TILE).abs().amax(dim=-1)
    scale = _power_of_two(amax.clamp(min=ACTIVATIONS) / E5M6_MAX)
    y = F.pad(x / _spread(scale, (1, TILE), R, C), (0, C % 2))
    bits = y.view(torch.int32)
    normal = ((bits + 0xFFFF + (bits >> 17 & 1)) & -(1 << 17)).view(torch.float32)  # 17 of 23 bits go
    small = torch.round(y * 2.0**20) * 2.0**-20  # below 2^-14 steps are all the same
    half = torch.where(y.abs() < 2.0**-14, small, torch.where(y.isfinite(), normal, y)).to(torch.float16)
    twelve = half.view(torch.int16).to(torch.int32) >> 4 & 0xFFF
    one, two = twelve.view(R, -1, 2).unbind(-1)
    packed = torch.stack([one >> 4, (one & 15) << 4 | two >> 8, two & 255], dim=-1).to(torch.uint8)
    return E5M6(packed.flatten(1), scale, C)


def _spread(scale: Tensor, tile: tuple[int, int], R: int, C: int) -> Tensor:
    rows = scale if tile[0] == 1 else scale.repeat_interleave(tile[0], -2)[..., :R, :]
    return rows if tile[1] == 1 else rows.repeat_interleave(tile[1], -1)[..., :C]
