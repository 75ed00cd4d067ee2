"""Triton kernels that quantise to E4M3: the numbers of ``moetrain_kernels.quantise``, bit for bit.

Divisions are the IEEE ones (``div_rn``): Triton's own are off by an ulp, which moves values over E4M3's ties. Columns
are written transposed and padded to whole blocks of 128 rows, each group's apart, so that the product that sums over
rows reads both operands along the sum, from aligned addresses, without a mask. Needs triton; nothing imports this
without it.

Legend: R rows, C columns, E groups, B blocks of up to 128 rows of one group.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moetrain_kernels.quantise import ACTIVATIONS, TILE, Quantised

E4M3 = torch.float8_e4m3fn


@triton.jit
def _scale(amax, floor, POWER_OF_TWO: tl.constexpr):
    amax = tl.maximum(amax, floor, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.div_rn(amax, tl.full(amax.shape, 448.0, tl.float32))
    if POWER_OF_TWO:
        bits = scale.to(tl.int32, bitcast=True)
        up = ((bits + 0x7FFFFF) >> 23) << 23  # the next exponent, but for powers of two themselves
        scale = tl.where(scale < float("inf"), up.to(tl.float32, bitcast=True), scale)
    return scale


@triton.jit
def _largest(x, AXIS: tl.constexpr):
    """Of magnitudes; NaN where there is one."""
    return tl.max(tl.abs(x), axis=AXIS) + tl.sum(tl.where(x != x, x, 0.0), axis=AXIS)


@triton.jit
def tiles_kernel(x, q, s, R, C, stride_x, floor, POWER_OF_TWO: tl.constexpr, BLOCK_R: tl.constexpr):
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.program_id(1) * 128 + tl.arange(0, 128)
    mask = (rows < R)[:, None] & (cols < C)[None, :]
    at = rows.to(tl.int64)[:, None]
    v = tl.load(x + at * stride_x + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = _scale(_largest(v, 1), floor, POWER_OF_TWO)
    tl.store(q + at * C + cols[None, :], tl.div_rn(v, scale[:, None]).to(tl.float8e4nv), mask=mask)
    tl.store(s + rows.to(tl.int64) * tl.cdiv(C, 128) + tl.program_id(1), scale, mask=rows < R)


@triton.jit
def blocks_kernel(x, q, qt, s, R, C, parts, floor, POWER_OF_TWO: tl.constexpr):
    """Matrices [M, R, C]; q as they are, qt transposed, ``parts`` side by side. Program: (rows, columns, matrix)."""
    matrix = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * 128 + tl.arange(0, 128)
    cols = tl.program_id(1) * 128 + tl.arange(0, 128)
    mask = (rows < R)[:, None] & (cols < C)[None, :]
    base = matrix * R * C
    v = tl.load(x + base + rows.to(tl.int64)[:, None] * C + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = _scale(_largest(_largest(v, 1)[None, :], 1), floor, POWER_OF_TWO)
    e4m3 = tl.div_rn(v, scale[:, None]).to(tl.float8e4nv)
    tl.store(q + base + rows.to(tl.int64)[:, None] * C + cols[None, :], e4m3, mask=mask)
    across = (matrix // parts) * parts * R * C + cols.to(tl.int64)[:, None] * (parts * R) + (matrix % parts) * R
    tl.store(qt + across + rows[None, :], tl.trans(e4m3), mask=tl.trans(mask))
    wide = tl.cdiv(C, 128)
    one = tl.arange(0, 1)
    tl.store(s + (matrix * tl.cdiv(R, 128) + tl.program_id(0)) * wide + tl.program_id(1) + one, scale)


@triton.jit
def columns_kernel(
    x, tile_scale, q, s, row_B, end_B, C, width, floor,
    POWER_OF_TWO: tl.constexpr, OF_TILES: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """One block of 128 rows and BLOCK_C columns: amax down each column, written transposed; past the end zeros."""
    block = tl.program_id(0).to(tl.int64)
    rows = tl.load(row_B + block) + tl.arange(0, 128)
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    there = rows < tl.load(end_B + block)
    mask = there[:, None] & (cols < C)[None, :]
    at = rows.to(tl.int64)[:, None]
    v = tl.load(x + at * C + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    if OF_TILES:
        v *= tl.load(tile_scale + at * tl.cdiv(C, 128) + (cols // 128)[None, :], mask=mask, other=0.0)
    scale = _scale(_largest(v, 0), floor, POWER_OF_TWO)
    e4m3 = tl.div_rn(v, scale[None, :]).to(tl.float8e4nv)
    into = cols.to(tl.int64)[:, None] * width + block * 128 + tl.arange(0, 128)[None, :]
    tl.store(q + into, tl.trans(e4m3), mask=(cols < C)[:, None])
    tl.store(s + block * C + cols, scale, mask=cols < C)


class Blocks(NamedTuple):
    """N rows in E groups, cut into blocks of up to ``size`` rows of one group: as many as there could be, some empty.

    Made on the device without a look at the counts. ``expert_B`` E-1 at most; an empty block has row = end.
    """

    expert_B: Tensor
    row_B: Tensor
    end_B: Tensor
    first_E: Tensor  # each group's first block
    count_E: Tensor  # and how many

    @classmethod
    def of(cls, counts_E: Tensor, rows: int, size: int = TILE) -> Blocks:
        E = counts_E.shape[0]
        many = rows // size + min(E, rows)
        end_E = counts_E.cumsum(0)
        count_E = (counts_E + (size - 1)) // size
        last_E = count_E.cumsum(0)
        place_B = torch.arange(many, device=counts_E.device)
        expert_B = torch.searchsorted(last_E, place_B, right=True)
        used = expert_B < E
        expert_B = expert_B.clamp(max=E - 1)
        first_E = last_E - count_E
        row_B = (end_E - counts_E)[expert_B] + (place_B - first_E[expert_B]) * size
        end_B = torch.where(used, end_E[expert_B], 0)
        row_B = torch.where(used, row_B, 0)
        narrow = (x.to(torch.int32) for x in (expert_B, row_B, end_B, first_E, count_E))
        return cls(*narrow)


class Columns(NamedTuple):
    """E4M3 [C, 128 B], transposed and padded, with scales fp32 [B, C]."""

    values: Tensor
    scale: Tensor


@torch.library.custom_op("moetrain::quantise_tiles", mutates_args=())
def _tiles(x: Tensor, power_of_two: bool, floor: float) -> tuple[Tensor, Tensor]:
    R, C = x.shape
    q = torch.empty(R, C, dtype=E4M3, device=x.device)
    s = torch.empty(R, triton.cdiv(C, TILE), dtype=torch.float32, device=x.device)
    if R:
        x = x if x.stride(1) == 1 else x.contiguous()
        grid = triton.cdiv(R, 32), s.shape[1]
        tiles_kernel[grid](x, q, s, R, C, x.stride(0), floor, POWER_OF_TWO=power_of_two, BLOCK_R=32, num_warps=4)
    return q, s


@_tiles.register_fake
def _(x: Tensor, power_of_two: bool, floor: float) -> tuple[Tensor, Tensor]:
    R, C = x.shape
    return x.new_empty(R, C, dtype=E4M3), x.new_empty(R, -(-C // TILE), dtype=torch.float32)


def tiles(x_RC: Tensor, *, power_of_two: bool = False, floor: float = ACTIVATIONS) -> Quantised:
    """``moetrain_kernels.quantise.tiles``: x fp32, bf16 or fp16."""
    q, s = _tiles(x_RC, power_of_two, floor)
    return Quantised(q, s, (1, TILE))


@torch.library.custom_op("moetrain::quantise_blocks", mutates_args=())
def blocks(w_EOI: Tensor, parts: int, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Stacked matrices [E, O, I] in 128 x 128 blocks, which start anew at each of ``parts`` of the rows.

    Returns:
        values, values transposed [E, I, O], scales [E, parts * ceil(O / parts / 128), ceil(I / 128)].
    """
    E, O, I = w_EOI.shape
    q = torch.empty(E, O, I, dtype=E4M3, device=w_EOI.device)
    qt = torch.empty(E, I, O, dtype=E4M3, device=w_EOI.device)
    high, wide = triton.cdiv(O // parts, TILE), triton.cdiv(I, TILE)
    s = torch.empty(E, parts * high, wide, dtype=torch.float32, device=w_EOI.device)
    blocks_kernel[(high, wide, E * parts)](
        w_EOI.contiguous(), q, qt, s, O // parts, I, parts, ACTIVATIONS, POWER_OF_TWO=power_of_two, num_warps=8
    )
    return q, qt, s


@blocks.register_fake
def _(w_EOI: Tensor, parts: int, power_of_two: bool) -> tuple[Tensor, Tensor, Tensor]:
    E, O, I = w_EOI.shape
    scale = w_EOI.new_empty(E, parts * -(-O // parts // TILE), -(-I // TILE), dtype=torch.float32)
    return w_EOI.new_empty(E, O, I, dtype=E4M3), w_EOI.new_empty(E, I, O, dtype=E4M3), scale


@torch.library.custom_op("moetrain::quantise_columns", mutates_args=())
def _columns(
    x: Tensor, tile_scale: Tensor | None, row_B: Tensor, end_B: Tensor, power_of_two: bool, floor: float
) -> tuple[Tensor, Tensor]:
    C, B = x.shape[1], row_B.shape[0]
    q = torch.empty(C, B * TILE, dtype=E4M3, device=x.device)
    s = torch.empty(B, C, dtype=torch.float32, device=x.device)
    if B:
        grid = B, triton.cdiv(C, 64)
        columns_kernel[grid](
            x.contiguous(), tile_scale if tile_scale is not None else s, q, s, row_B, end_B, C, B * TILE, floor,
            POWER_OF_TWO=power_of_two, OF_TILES=tile_scale is not None, BLOCK_C=64, num_warps=4,
        )  # fmt: skip
    return q, s


@_columns.register_fake
def _(
    x: Tensor, tile_scale: Tensor | None, row_B: Tensor, end_B: Tensor, power_of_two: bool, floor: float
) -> tuple[Tensor, Tensor]:
    C, B = x.shape[1], row_B.shape[0]
    return x.new_empty(C, B * TILE, dtype=E4M3), x.new_empty(B, C, dtype=torch.float32)


def columns(x: Tensor | Quantised, rows: Blocks, *, power_of_two: bool = False, floor: float = ACTIVATIONS) -> Columns:
    """A scale for 128 rows of a column in each group; of tiles, without bringing them back in memory first."""
    values, scale = (x.values, x.scale) if isinstance(x, Quantised) else (x, None)
    return Columns(*_columns(values, scale, rows.row_B, rows.end_B, power_of_two, floor))
