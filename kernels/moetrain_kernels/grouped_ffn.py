"""The experts' SwiGLU over a buffer sorted by expert, as one autograd function.

Why one function: an indexed loop (``w[e]``) builds a full zero gradient per expert in its backward, a batched product
pads every expert to the largest, and ``grouped_mm`` is a slow path on CPU. Here each expert is one matrix product over
its own contiguous rows, in both directions, with zero-row experts skipped (their gradient is an exact zero), and only
the gate and up products ``[N, 2m]`` are kept for the backward. The weight of the router enters before the down
product, where rows are narrow.

Legend: R input rows, D width, N = entries (row, expert), m expert width, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moetrain_kernels.products import add_weight_gradient


def _sum_rows(y_ND: Tensor, position_N: Tensor, offset_R: Tensor) -> Tensor:
    """Row r of the result is the sum of the entries ``position_N[offset_R[r] : offset_R[r + 1]]`` of y_ND."""
    return torch.ops.aten._embedding_bag_forward_only(y_ND, position_N, offset_R, False, 0, False)[0]  # type: ignore[no-any-return]


def _weighted(h_Nm: Tensor, weight_N: Tensor) -> Tensor:
    """Rows times router weights, in h's dtype; h is used up."""
    if h_Nm.dtype == weight_N.dtype:
        return h_Nm.mul_(weight_N.unsqueeze(1))
    return (h_Nm * weight_N.unsqueeze(1)).to(h_Nm.dtype)


def _weight_grad(weight: Tensor, in_place: bool) -> tuple[Tensor, bool]:
    """The buffer that collects a stacked weight's gradient, and whether something is in it already."""
    if in_place and weight.grad is not None:
        return weight.grad, True
    fresh = torch.empty_like(weight)
    if in_place:
        weight.grad = fresh
    return fresh, False


def _products(dws: Tensor, dys: tuple[Tensor, ...], xs: tuple[Tensor, ...], add: bool) -> None:
    for dw, dy, x in zip(dws.unbind(0), dys, xs, strict=True):
        if add:
            if dy.shape[0]:
                dw.addmm_(dy.t(), x)
        elif dy.shape[0]:
            torch.mm(dy.t(), x, out=dw)
        else:
            dw.zero_()


class _GroupedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RD: Tensor,
        gate_up: Tensor,
        down: Tensor,
        weight_N: Tensor,
        row_N: Tensor,
        position_N: Tensor,
        offset_R: Tensor,
        counts: list[int],
        in_place: bool,
    ) -> Tensor:
        n, m = row_N.shape[0], down.shape[2]
        x_ND = x_RD.index_select(0, row_N)
        gu = x_RD.new_empty(n, 2 * m)
        for x, w, out in zip(x_ND.split(counts), gate_up.unbind(0), gu.split(counts), strict=True):
            if x.shape[0]:
                torch.mm(x, w.t(), out=out)
        h = _weighted(F.silu(gu[:, :m]).mul_(gu[:, m:]), weight_N)
        y_ND = x_ND  # same shape; the gathered rows are not needed any more
        for x, w, out in zip(h.split(counts), down.unbind(0), y_ND.split(counts), strict=True):
            if x.shape[0]:
                torch.mm(x, w.t(), out=out)
        ctx.save_for_backward(x_RD, gu, weight_N, row_N, position_N, offset_R)
        ctx.gate_up, ctx.down, ctx.counts, ctx.in_place = gate_up, down, counts, in_place
        return _sum_rows(y_ND, position_N, offset_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_RD: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, gu, weight_N, row_N, position_N, offset_R = ctx.saved_tensors
        gate_up, down, counts, in_place = ctx.gate_up, ctx.down, ctx.counts, ctx.in_place
        m = down.shape[2]
        g, u = gu[:, :m], gu[:, m:]

        dy_ND = dy_RD.index_select(0, row_N)
        dy_groups = dy_ND.split(counts)
        dh = gu.new_empty(g.shape)
        for dy, w, out in zip(dy_groups, down.unbind(0), dh.split(counts), strict=True):
            if dy.shape[0]:
                torch.mm(dy, w, out=out)
        act = F.silu(g)
        h = act * u
        dweight = torch.linalg.vecdot(dh.to(weight_N.dtype), h.to(weight_N.dtype)) if ctx.needs_input_grad[3] else None
        d_down = None
        if ctx.needs_input_grad[2]:
            d_down, add = _weight_grad(down, in_place)
            _products(d_down, dy_groups, _weighted(h, weight_N).split(counts), add)
        dh = _weighted(dh, weight_N)
        dgu = torch.empty_like(gu)
        torch.mul(dh, act, out=dgu[:, m:])
        torch.ops.aten.silu_backward.grad_input(dh.mul_(u), g, grad_input=dgu[:, :m])
        del act, h, dh
        dgu_groups = dgu.split(counts)
        d_gate_up = None
        if ctx.needs_input_grad[1]:
            x_ND = torch.index_select(x_RD, 0, row_N, out=dy_ND) if x_RD.dtype == dy_ND.dtype else x_RD[row_N]
            d_gate_up, add = _weight_grad(gate_up, in_place)
            _products(d_gate_up, dgu_groups, x_ND.split(counts), add)
        dx = None
        if ctx.needs_input_grad[0]:
            for d, w, out in zip(dgu_groups, gate_up.unbind(0), dy_groups, strict=True):
                if d.shape[0]:
                    torch.mm(d, w, out=out)
            dx = _sum_rows(dy_ND, position_N, offset_R)
        if in_place:
            d_gate_up = d_down = None
        return dx, d_gate_up, d_down, dweight, None, None, None, None, None


def grouped_swiglu(
    x_RD: Tensor,
    gate_up: Tensor,
    down: Tensor,
    weight_N: Tensor,
    *,
    row_N: Tensor,
    position_N: Tensor,
    offset_R: Tensor,
    counts: list[int],
    in_place_grad: bool = False,
) -> Tensor:
    """``y_r = sum over entries n of row r: weight_n * down_e(silu(gate_e x_r) * up_e x_r)``, e the expert of entry n.

    Args:
        x_RD: input rows.
        gate_up: [E, 2m, D], gate rows first.
        down: [E, D, m].
        weight_N: router weights of the entries, sorted by expert; at least fp32.
        row_N: int64, the input row of each entry, sorted by expert.
        position_N, offset_R: int64, for each row the places of its entries in the sorted order:
            ``position_N[offset_R[r] : offset_R[r + 1]]`` (the last row's run to the end).
        counts: entries of each expert, E numbers that sum to N; zeros are fine, and so is one expert with all.
        in_place_grad: add the weights' gradients into their ``.grad`` (the weights must be leaves).

    Returns:
        [R, D], the dtype of x_RD.
    """
    y: Tensor = _GroupedSwiGLU.apply(x_RD, gate_up, down, weight_N, row_N, position_N, offset_R, counts, in_place_grad)
    return y


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate_up: Tensor, down: Tensor, in_place: bool) -> Tensor:
        m = down.shape[1]
        gu = torch.mm(x, gate_up.t())
        h = F.silu(gu[:, :m]).mul_(gu[:, m:])
        ctx.save_for_backward(x, gu)
        ctx.gate_up, ctx.down, ctx.in_place = gate_up, down, in_place
        return torch.mm(h, down.t())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, gu = ctx.saved_tensors
        gate_up, down = ctx.gate_up, ctx.down
        m = down.shape[1]
        g, u = gu[:, :m], gu[:, m:]
        act = F.silu(g)
        dh = torch.mm(dy, down)
        d_gate_up = d_down = dx = None
        if ctx.needs_input_grad[2]:
            if ctx.in_place:
                add_weight_gradient(down, dy, act * u)
            else:
                d_down = torch.mm(dy.t(), act * u)
        dgu = torch.empty_like(gu)
        torch.mul(dh, act, out=dgu[:, m:])
        torch.ops.aten.silu_backward.grad_input(dh.mul_(u), g, grad_input=dgu[:, :m])
        del act, dh
        if ctx.needs_input_grad[1]:
            if ctx.in_place:
                add_weight_gradient(gate_up, dgu, x)
            else:
                d_gate_up = torch.mm(dgu.t(), x)
        if ctx.needs_input_grad[0]:
            dx = torch.mm(dgu, gate_up)
        return dx, d_gate_up, d_down, None


def swiglu(x_ND: Tensor, gate_up: Tensor, down: Tensor, *, in_place_grad: bool = False) -> Tensor:
    """``down(silu(gate x) * up x)`` (dense and shared experts): x [N, D], gate_up [2m, D], down [D, m] -> [N, D].

    Only x and the gate and up products are kept for the backward; the SwiGLU output is computed again (V3 paper 3.2.3).
    """
    y: Tensor = _SwiGLU.apply(x_ND, gate_up, down, in_place_grad)
    return y
