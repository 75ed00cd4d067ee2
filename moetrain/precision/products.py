"""What multiplies quantised operands: one interface, chosen once for a run and printed, never silently replaced.

``Reference`` brings operands back and multiplies in fp32 (at least): it runs anywhere, slowly, and defines the numbers
that the faster ones have to give.

A linear layer is one group of rows, a layer's experts are many: row n of a group meets the group's weight.

Legend: N rows sorted by group, E groups (experts), I inputs, O outputs.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from moetrain_kernels.quantise import GRADIENTS, Quantised, columns, quantise, tiles


class Groups:
    """How many of N rows each of E groups has; read on the host only by those who ask."""

    def __init__(self, counts_E: Tensor, rows: int) -> None:
        self.counts_E, self.rows = counts_E, rows

    @cached_property
    def counts(self) -> list[int]:
        return [self.rows] if self.counts_E.numel() == 1 else self.counts_E.tolist()


class Products(Protocol):
    """The three products of the recipe and what they take (V3 paper 3.3.1, 3.3.2)."""

    describe: str

    def tiles(self, x_NC: Tensor, *, power_of_two: bool, floor: float) -> Quantised:
        """1 x 128 tiles; an amax below ``floor`` counts as that."""
        ...

    def weight(self, w_EOI: Tensor, parts: int, *, power_of_two: bool) -> Any:
        """128 x 128 blocks of each matrix, stacked ``parts`` (gate and up rows) apart; its form is their own."""
        ...

    def fprop(self, x: Quantised, weight: Any, groups: Groups, dtype: torch.dtype) -> Tensor:
        """``x W^T``: [N, O]."""
        ...

    def dgrad(self, dy: Quantised, weight: Any, groups: Groups, dtype: torch.dtype) -> Tensor:
        """``dy W``: [N, I]."""
        ...

    def wgrad(self, dy_NO: Tensor, x: Tensor | Quantised, groups: Groups, *, power_of_two: bool) -> Tensor:
        """``dy^T x`` of each group in fp32 (at least): [E, O, I]; both operands in 128 x 1 columns made here.

        x is what Fprop saw, brought back and made into columns. Groups without rows get zeros.
        """
        ...


class Reference:
    """Quantised, brought back, multiplied in fp32."""

    describe = "reference (quantised, fp32 products)"

    def tiles(self, x_NC: Tensor, *, power_of_two: bool, floor: float) -> Quantised:
        return tiles(x_NC, power_of_two=power_of_two, floor=floor)

    def weight(self, w_EOI: Tensor, parts: int, *, power_of_two: bool) -> Quantised:
        return quantise(w_EOI.unflatten(1, (parts, -1)), (128, 128), power_of_two=power_of_two)

    def fprop(self, x: Quantised, weight: Quantised, groups: Groups, dtype: torch.dtype) -> Tensor:
        y = torch.empty(x.values.shape[0], _outputs(weight), dtype=dtype, device=x.values.device)
        stat = torch.promote_types(dtype, torch.float32)
        rows = x.dequantise(stat).split(groups.counts)
        for a, w, out in zip(rows, _matrices(weight, stat), y.split(groups.counts), strict=True):
            if a.shape[0]:
                out.copy_(torch.mm(a, w().t()))
        return y

    def dgrad(self, dy: Quantised, weight: Quantised, groups: Groups, dtype: torch.dtype) -> Tensor:
        dx = torch.empty(dy.values.shape[0], weight.values.shape[-1], dtype=dtype, device=dy.values.device)
        stat = torch.promote_types(dtype, torch.float32)
        rows = dy.dequantise(stat).split(groups.counts)
        for g, w, out in zip(rows, _matrices(weight, stat), dx.split(groups.counts), strict=True):
            if g.shape[0]:
                out.copy_(torch.mm(g, w()))
        return dx

    def wgrad(self, dy_NO: Tensor, x: Tensor | Quantised, groups: Groups, *, power_of_two: bool) -> Tensor:
        stat = torch.promote_types(dy_NO.dtype, torch.float32)
        x_NI = x.dequantise(stat) if isinstance(x, Quantised) else x
        dw = torch.zeros(len(groups.counts), dy_NO.shape[1], x_NI.shape[1], dtype=stat, device=dy_NO.device)
        for g, a, out in zip(dy_NO.split(groups.counts), x_NI.split(groups.counts), dw.unbind(0), strict=True):
            if g.shape[0]:
                g = columns(g, power_of_two=power_of_two, floor=GRADIENTS).dequantise(stat)
                a = columns(a, power_of_two=power_of_two).dequantise(stat)
                torch.mm(g.t(), a, out=out)
        return dw


def products_for(name: str, device: torch.device) -> Products:
    """The products of ``fp8.products`` on a device; ``auto`` chooses once, anything else is what it says or an error.

    Raises:
        UserError: this machine lacks what was asked for.
    """
    return Reference()


def _outputs(weight: Quantised) -> int:
    return weight.values.shape[1] * weight.values.shape[2]


def _matrices(weight: Quantised, dtype: torch.dtype) -> list[Any]:
    """Of each group, what makes its matrix [O, I] when it is needed: a group without rows needs none."""
    return [
        lambda v=v, s=s: Quantised(v, s, weight.tile).dequantise(dtype).flatten(0, 1)
        for v, s in zip(weight.values.unbind(0), weight.scale.unbind(0), strict=True)
    ]
