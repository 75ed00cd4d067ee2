"""The recipe of DeepSeek-V3 (3.3): all three products of a linear layer take E4M3 operands and sum in fp32.

    Fprop  y = x W^T     x in 1 x 128 tiles, W in 128 x 128 blocks
    Dgrad  dx = dy W     dy in 1 x 128 tiles, W in 128 x 128 blocks
    Wgrad  dW = dy^T x   both in 128 x 1 columns, since tokens are what is summed over

What waits for the backward is the input as Fprop took it (E4M3 and its scales), made into columns again for Wgrad; of a
SwiGLU its input, also in tiles, from which its output is computed again. What stays high is decided outside, by whose
product is replaced (``moetrain.parallel.plan``): embedding, head, gates, norms, attention core and MTP's projection.

This is the exact reference: operands are quantised, brought back, and multiplied in fp32 (at least). It runs anywhere,
slowly; faster ones have to give its numbers. Weights are quantised in every use, which gives the same values as long as
the weights are the same, so within a window they are. Gate and up rows of a stacked weight are quantised apart, as the
released files have them.

Legend: N tokens, I inputs, O outputs, D width, m expert width, E experts.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from moetrain_kernels.quantise import Quantised, blocks, columns, tiles


class Routed(Protocol):
    """What ``moetrain.model.backends.Routed`` is."""

    @property
    def x_RD(self) -> Tensor: ...

    @property
    def weight_N(self) -> Tensor: ...

    @property
    def row_N(self) -> Tensor: ...

    @property
    def position_N(self) -> Tensor: ...

    @property
    def offset_R(self) -> Tensor: ...

    @property
    def counts_E(self) -> Tensor: ...


def fp8_linear(x: Tensor, weight: Tensor, *, in_place_grad: bool = False) -> Tensor:
    """``x @ weight.T``: x [..., I], weight [O, I] -> [..., O], the dtype of x."""
    y: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, in_place_grad, 1)
    return y.view(*x.shape[:-1], weight.shape[0])


def fp8_swiglu(x_ND: Tensor, gate_up: Tensor, down: Tensor, *, in_place_grad: bool = False) -> Tensor:
    """``down(silu(gate x) * up x)``: x [N, D], gate_up [2m, D], down [D, m] -> [N, D]."""
    gu = _Linear.apply(x_ND, gate_up, in_place_grad, 2)
    y: Tensor = _Linear.apply(_SwiGLU.apply(gu, None), down, in_place_grad, 1)
    return y


def fp8_experts(routed: Routed, gate_up: Tensor, down: Tensor, *, in_place_grad: bool = False) -> Tensor:
    """SwiGLU of every entry by its expert, weighted and summed over the entries of each row: [R, D].

    gate_up [E, 2m, D], down [E, D, m]. Each expert's entries are a matrix of their own, also for the columns of Wgrad.
    Reads the counts on the host.
    """
    counts = routed.counts_E.tolist()
    x_ND = routed.x_RD.index_select(0, routed.row_N)
    gu = _Experts.apply(x_ND, gate_up, counts, in_place_grad, 2)
    y_ND = _Experts.apply(_SwiGLU.apply(gu, routed.weight_N), down, counts, in_place_grad, 1)
    return F.embedding_bag(routed.position_N, y_ND, routed.offset_R, mode="sum")


def _weight(w: Tensor, parts: int, dtype: torch.dtype) -> Tensor:
    """W as the products see it: quantised in blocks, each of its stacked ``parts`` apart."""
    return torch.cat([blocks(part).dequantise(dtype) for part in w.chunk(parts)])


def _wgrad(dy: Tensor, x: Quantised, dtype: torch.dtype) -> Tensor:
    again = columns(x.dequantise(dtype)).dequantise(dtype)
    return torch.mm(columns(dy).dequantise(dtype).t(), again)


def _at_least_fp32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _into(weight: Tensor, dw: Tensor, in_place: bool) -> Tensor | None:
    dw = dw.to(weight.dtype)
    if not in_place:
        return dw
    if weight.grad is None:
        weight.grad = dw
    else:
        weight.grad.add_(dw)
    return None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, in_place: bool, parts: int) -> Tensor:
        stat = _at_least_fp32(x)
        q = tiles(x)
        ctx.save_for_backward(q.values, q.scale)
        ctx.tile, ctx.weight, ctx.in_place, ctx.parts = q.tile, weight, in_place, parts
        return torch.mm(q.dequantise(stat), _weight(weight, parts, stat).t()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        values, scale = ctx.saved_tensors
        x = Quantised(values, scale, ctx.tile)
        weight, stat = ctx.weight, _at_least_fp32(dy)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.mm(tiles(dy).dequantise(stat), _weight(weight, ctx.parts, stat)).to(dy.dtype)
        if ctx.needs_input_grad[1]:
            dw = _into(weight, _wgrad(dy, x, stat), ctx.in_place)
        return dx, dw, None, None


class _Experts(torch.autograd.Function):
    """One ``_Linear`` for each expert's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: list[int], in_place: bool, parts: int) -> Tensor:
        stat = _at_least_fp32(x)
        q = tiles(x)
        ctx.save_for_backward(q.values, q.scale)
        ctx.tile, ctx.weight, ctx.counts, ctx.in_place, ctx.parts = q.tile, weight, counts, in_place, parts
        y = x.new_empty(x.shape[0], weight.shape[1])
        for rows, w, out in zip(q.dequantise(stat).split(counts), weight.unbind(0), y.split(counts), strict=True):
            if rows.shape[0]:
                out.copy_(torch.mm(rows, _weight(w, parts, stat).t()))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        values, scale = ctx.saved_tensors
        weight, counts, stat = ctx.weight, ctx.counts, _at_least_fp32(dy)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = dy.new_empty(values.shape)
            rows = tiles(dy).dequantise(stat).split(counts)
            for g, w, out in zip(rows, weight.unbind(0), dx.split(counts), strict=True):
                if g.shape[0]:
                    out.copy_(torch.mm(g, _weight(w, ctx.parts, stat)))
        if ctx.needs_input_grad[1]:
            fresh = torch.zeros(weight.shape, dtype=stat, device=weight.device)
            own = zip(dy.split(counts), values.split(counts), scale.split(counts), fresh.unbind(0), strict=True)
            for g, v, s, out in own:
                if g.shape[0]:
                    out.copy_(_wgrad(g, Quantised(v, s, ctx.tile), stat))
            dw = _into(weight, fresh, ctx.in_place)
        return dx, dw, None, None, None


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, times the router's weight where there is one; keeps its input in tiles, and no output."""

    @staticmethod
    def forward(ctx: Any, gu: Tensor, weight_N: Tensor | None) -> Tensor:
        q = tiles(gu)
        ctx.save_for_backward(q.values, q.scale, weight_N)
        ctx.tile = q.tile
        gate, up = gu.chunk(2, dim=-1)
        h = F.silu(gate) * up
        return h if weight_N is None else (h * weight_N.unsqueeze(1)).to(gu.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dh: Tensor) -> tuple[Tensor, Tensor | None]:
        values, scale, weight_N = ctx.saved_tensors
        stat = _at_least_fp32(dh)
        gate, up = Quantised(values, scale, ctx.tile).dequantise(stat).chunk(2, dim=-1)
        act, g = F.silu(gate), dh.to(stat)
        dweight = None
        if weight_N is not None:
            dweight = torch.linalg.vecdot(g, act * up).to(weight_N.dtype)
            g = g * weight_N.to(stat).unsqueeze(1)
        dgate = torch.ops.aten.silu_backward(g * up, gate)
        return torch.cat([dgate, g * act], dim=-1).to(dh.dtype), dweight
