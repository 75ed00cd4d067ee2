"""FP8 products by other libraries, behind the interface of ``moetrain.precision.products``: torch's and DeepGEMM's.

Quantising, SwiGLU and what a library does not do stay the project's own kernels; ``describe`` says what is whose. Both
were checked against stand-ins that hold them to the layouts they document (``tests/unit/test_fp8_libraries.py``);
neither has run on a GPU yet.

Legend: N rows sorted by group, E groups (experts), I inputs, O outputs, P rows padded to whole blocks of 128.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moetrain.precision.products import Groups, Triton
from moetrain_kernels.quantise import TILE, Quantised


class _Weight(NamedTuple):
    """E4M3 [E, O, I] with scales [E, O / 128, I / 128], and both transposed."""

    values: Tensor
    scale: Tensor
    transposed: Tensor
    transposed_scale: Tensor


class _Library(Triton):
    """The kernels around somebody else's ``product``, which takes sizes that 128 divides."""

    def weight(self, w_EOI: Tensor, parts: int, *, power_of_two: bool) -> Any:
        if w_EOI.shape[2] % TILE or w_EOI.shape[1] % (parts * TILE):
            raise ValueError(
                f"a weight of {w_EOI.shape[1]} x {w_EOI.shape[2]} has sizes that 128 does not divide: "
                "use fp8.products=triton"
            )
        w = super().weight(w_EOI, parts, power_of_two=power_of_two)
        return _Weight(w.values, w.scale, w.transposed, w.scale.transpose(1, 2).contiguous())

    def fprop(self, x: Quantised, weight: Any, groups: Groups, dtype: torch.dtype) -> Tensor:
        return self.product(x, weight.values, weight.scale, groups, dtype)

    def dgrad(self, dy: Quantised, weight: Any, groups: Groups, dtype: torch.dtype) -> Tensor:
        return self.product(dy, weight.transposed, weight.transposed_scale, groups, dtype)

    def product(self, x: Quantised, w_EJK: Tensor, scale: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
        """``x w^T`` of each group: [N, J]."""
        raise NotImplementedError


class TorchScaled(_Library):
    """``torch.nn.functional.scaled_mm`` (cuBLAS, Hopper only), a call for each group: counts are read on the host."""

    describe = "torch scaled_mm, one for each expert; Triton for the rest"

    def product(self, x: Quantised, w_EJK: Tensor, scale: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
        y = torch.empty(x.values.shape[0], w_EJK.shape[1], dtype=dtype, device=x.values.device)
        start = 0
        for count, w, w_scale in zip(groups.counts, w_EJK.unbind(0), scale.unbind(0), strict=True):
            if count:
                own, more = slice(start, start + count), -count % 4  # columns of scales begin at multiples of 16 bytes
                a = F.pad(x.values[own].view(torch.uint8), (0, 0, 0, more)).view(x.values.dtype)
                product = F.scaled_mm(
                    a,
                    w.t(),
                    _outer_major(F.pad(x.scale[own], (0, 0, 0, more))),
                    F.ScalingType.BlockWise1x128,
                    F.pad(w_scale, (0, -w_scale.shape[1] % 4)).t(),
                    F.ScalingType.BlockWise128x128,
                    output_dtype=dtype,
                )
                y[own] = product[:count]
            start += count
        return y

    def wgrad(self, dy_NO: Tensor, x: Tensor | Quantised, groups: Groups, *, power_of_two: bool) -> Tensor:
        dy, cols, _ = self.columns(dy_NO, x, groups, power_of_two=power_of_two)
        dw = dy.scale.new_zeros(len(groups.counts), dy.values.shape[0], cols.values.shape[0])
        block = 0
        for count, out in zip(groups.counts, dw, strict=True):
            last = block + -(-count // TILE)
            if count:
                (a, a_scale), (b, b_scale) = (
                    (
                        q.values.view(torch.uint8)[:, block * TILE : last * TILE].contiguous().view(q.values.dtype),
                        _outer_major(q.scale[block:last].t()),
                    )
                    for q in (dy, cols)
                )
                tiles = F.ScalingType.BlockWise1x128
                out.copy_(F.scaled_mm(a, b.t(), a_scale, tiles, b_scale, tiles, output_dtype=torch.float32))
            block = last
        return dw


class DeepGemm(_Library):
    """DeepGEMM for Fprop and Dgrad: each expert's rows moved to whole blocks of 128, as its grouped product takes them.

    Args:
        library: the module ``deep_gemm``.
        blackwell: scales are handed over as powers of two, packed by DeepGEMM.
    """

    describe = "DeepGEMM for outputs and inputs; Triton for weight gradients and the rest"

    def __init__(self, library: Any, *, blackwell: bool) -> None:
        super().__init__()
        self.library, self.cast = library, {"disable_ue8m0_cast": not blackwell}

    def product(self, x: Quantised, w_EJK: Tensor, scale: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
        J = w_EJK.shape[1]
        if not groups.rows:
            return x.scale.new_empty(0, J, dtype=dtype)
        if w_EJK.shape[0] == 1:
            y = x.scale.new_empty(groups.rows, J, dtype=torch.bfloat16)
            self.library.fp8_gemm_nt((x.values, x.scale), (w_EJK[0], scale[0]), y, **self.cast)
            return y.to(dtype)
        blocks = self.blocks(groups)
        row_P = (blocks.row_B.unsqueeze(1) + torch.arange(TILE, device=x.scale.device)).flatten()
        there_P = row_P < blocks.end_B.repeat_interleave(TILE)
        expert_P = torch.where(there_P, blocks.expert_B.repeat_interleave(TILE), -1)  # -1: padding
        padded = x.rows(torch.where(there_P, row_P, 0))
        y = x.scale.new_empty(row_P.shape[0], J, dtype=torch.bfloat16)
        self.library.m_grouped_fp8_gemm_nt_contiguous(
            (padded.values, padded.scale), (w_EJK, scale), y, expert_P.to(torch.int32), **self.cast
        )
        into = torch.where(there_P, row_P, groups.rows)  # padding falls off the end
        out = y.new_empty(groups.rows + 1, J)
        return out.index_copy_(0, into, y)[: groups.rows].to(dtype)


def _outer_major(scale: Tensor) -> Tensor:
    """[M, K / 128] with strides (1, M), as torch's products of tiles take it."""
    return scale.t().contiguous().t()
