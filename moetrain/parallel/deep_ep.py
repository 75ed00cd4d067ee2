"""Tokens to experts through DeepEP (github.com/deepseek-ai/DeepEP), where it is installed: NVLink and RDMA at once.

The verbs are those of ``moetrain.parallel.ep.AllToAllDispatcher``, and so is what they mean: a token travels once to
each rank that holds one of its experts, the shared experts run meanwhile, sums come back. DeepEP carries bf16, or E4M3
with its scales; router weights are fp32.

Its interface was checked against a stand-in that keeps DeepEP's documented contract over gloo, where nothing is there
before it is waited for: a model's step is the one over all-to-all. Not yet run on GPUs.

Legend: T tokens, K experts per token, D width, R rows that arrive, N entries (row, expert).
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from moetrain.model.backends import Routed
from moetrain.parallel.ep import Count, by_expert
from moetrain_kernels.quantise import ACTIVATIONS, GRADIENTS, Quantised, tiles


def installed() -> bool:
    return importlib.util.find_spec("deep_ep") is not None


def buffer_for(group: dist.ProcessGroup, width: int) -> Any:
    """DeepEP's communication buffer, one for all layers, large enough for rows of ``width`` bf16 values."""
    from deep_ep import Buffer

    ranks = group.size()
    configs = Buffer.get_dispatch_config(ranks), Buffer.get_combine_config(ranks)
    nvlink = max(config.get_nvl_buffer_size_hint(2 * width, ranks) for config in configs)
    rdma = max(config.get_rdma_buffer_size_hint(2 * width, ranks) for config in configs)
    return Buffer(group, nvlink, rdma)


class _Sent(NamedTuple):
    trip: _Trip
    x_RD: Tensor
    weight_RK: Tensor


class DeepEPDispatcher:
    """``moetrain.model.dispatch.Dispatcher`` over a DeepEP buffer.

    Args:
        buffer: ``deep_ep.Buffer`` of the expert group.
        ranks: of that group.
        experts: E, a multiple of them.
        fp8: rows, and their gradients before the down product, travel as E4M3 with power-of-two scales.
    """

    def __init__(self, buffer: Any, ranks: int, experts: int, *, fp8: bool = False) -> None:
        self.buffer, self.experts, self.local, self.fp8 = buffer, experts, experts // ranks, fp8
        self.count: Count = lambda kind, sent: None

    def send(self, x_TD: Tensor, choice_TK: Tensor, weight_TK: Tensor) -> _Sent:
        trip = _Trip(self, choice_TK)
        return _Sent(trip, *_Leave.apply(x_TD, weight_TK.float(), trip))

    def receive(self, sent: _Sent) -> Routed:
        x_RD, weight_RK = _Arrive.apply(sent.x_RD, sent.weight_RK, sent.trip)
        row_N, place_N = (sent.trip.expert_RK >= 0).nonzero().unbind(dim=1)  # -1: another rank's
        expert_N = sent.trip.expert_RK[row_N, place_N].long()
        return by_expert(x_RD, weight_RK[row_N, place_N], expert_N, row_N, self.local)

    def combine(self, y_RD: Tensor, sent: _Sent) -> Tensor:
        y: Tensor = _Return.apply(y_RD, sent.trip)
        return y

    def encode(self, x: Tensor, floor: float) -> Any:
        if not self.fp8:
            self.count("experts", x)
            return x
        q = tiles(x, power_of_two=True, floor=floor)
        self.count("experts", q.values)
        return q.values, q.scale

    def decode(self, x: Any, dtype: torch.dtype) -> Tensor:
        out: Tensor = Quantised(x[0], x[1], (1, 128)).dequantise(dtype) if self.fp8 else x
        return out


class _Trip:
    """One layer's forward: what DeepEP needs to bring rows back, and what is under way."""

    def __init__(self, dispatcher: DeepEPDispatcher, choice_TK: Tensor) -> None:
        self.dispatcher, self.choice_TK = dispatcher, choice_TK
        self.handle: Any = None
        self.event: Any = None
        self.expert_RK: Tensor
        self.out: tuple[Any, Tensor]  # rows and weights
        self.back: tuple[Tensor, Tensor]  # their gradients


class _Leave(torch.autograd.Function):
    """See ``moetrain.parallel.ep``: what autograd is given says only shapes."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_TK: Tensor, trip: _Trip) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        dispatcher = trip.dispatcher
        rank, rdma_rank, expert, in_rank, _ = dispatcher.buffer.get_dispatch_layout(trip.choice_TK, dispatcher.experts)
        rows, trip.expert_RK, weight_RK, _, trip.handle, trip.event = dispatcher.buffer.dispatch(
            dispatcher.encode(x_TD, ACTIVATIONS),
            topk_idx=trip.choice_TK,
            topk_weights=weight_TK,
            num_tokens_per_rank=rank,
            num_tokens_per_rdma_rank=rdma_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=expert,
            async_finish=True,
        )
        trip.out = rows, weight_RK
        shape = weight_RK.shape[0], x_TD.shape[1]
        return x_TD.new_empty(1, 1).expand(shape), weight_TK.new_empty(1, 1).expand(weight_RK.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *shapes: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.trip.event.current_stream_wait()
        dx, dweight = ctx.trip.back
        del ctx.trip.back
        return dx, dweight, None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weight_RK: Tensor, trip: _Trip) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        trip.event.current_stream_wait()
        rows, weights = trip.out
        del trip.out
        return trip.dispatcher.decode(rows, x_RD.dtype), weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, dweight_RK: Tensor) -> tuple[Tensor, Tensor, None]:
        trip = ctx.trip
        trip.dispatcher.count("experts", dx)
        back, weights, trip.event = trip.dispatcher.buffer.combine(
            dx.contiguous(), trip.handle, topk_weights=dweight_RK.contiguous(), async_finish=True
        )
        trip.back = back, weights
        return dx, dweight_RK, None


class _Return(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, trip: _Trip) -> Tensor:
        ctx.trip = trip
        trip.dispatcher.count("experts", y)
        out: Tensor
        out, _, event = trip.dispatcher.buffer.combine(y.contiguous(), trip.handle, async_finish=True)
        event.current_stream_wait()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        trip, dispatcher = ctx.trip, ctx.trip.dispatcher
        rows, *_, event = dispatcher.buffer.dispatch(
            dispatcher.encode(g.contiguous(), GRADIENTS), handle=trip.handle, async_finish=True
        )
        event.current_stream_wait()
        return dispatcher.decode(rows, g.dtype), None
