"""Expert parallelism: each rank of an expert group holds a run of neighbouring experts, and tokens travel to them.

A token travels once to every rank that holds at least one of its experts, however many it has there, and comes back as
one row: the experts of a rank are summed where they are. With V3's node-limited routing (paper 2.1.2) and expert groups
placed on ranks in order, that is at most ``topk_group`` rows per token where each group is a rank.

Legend: T tokens, K experts per token, D width, G ranks of the expert group, E experts, F experts of one rank, R rows
that travel, N entries (row, expert).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from moetrain.model.backends import Experts, Routed
from moetrain.model.moe import MoE


class _Sent(NamedTuple):
    """What ``combine`` needs to bring rows back: splits, and for each token the places of its rows."""

    rows_out: list[int]
    rows_in: list[int]
    position_R: Tensor
    offset_T: Tensor


#: told of every tensor that is sent, and under which name
Count = Callable[[Literal["experts"], Tensor], None]


class AllToAllDispatcher:
    """``moetrain.model.dispatch.Dispatcher`` over a process group; any number of rows per rank, also none.

    The row counts are read on the host once per layer, since the sizes of what is received follow from them.

    Args:
        group: the expert group; rank g of it holds experts g * F .. (g + 1) * F - 1.
        experts: E, a multiple of the group's size.
        layer: its place in the model, for messages.
    """

    def __init__(self, group: dist.ProcessGroup, experts: int, *, layer: str = "") -> None:
        self.group, self.ranks, self.layer = group, group.size(), layer
        self.local = experts // self.ranks
        self.count: Count = lambda kind, sent: None

    def dispatch(self, x_TD: Tensor, choice_TK: Tensor, weight_TK: Tensor) -> tuple[Routed, _Sent]:
        T, K = choice_TK.shape
        rank_TK = choice_TK // self.local
        goes_TG = torch.zeros(T, self.ranks, dtype=torch.bool, device=x_TD.device).scatter_(1, rank_TK, True)
        # rows in the order (rank, token), entries in the order (rank, token, k)
        rows_G = goes_TG.sum(dim=0)
        place_GT = (goes_TG.t().flatten().cumsum(0) - 1).view(self.ranks, T)
        token_R = goes_TG.t().nonzero()[:, 1]
        order_N = rank_TK.flatten().argsort(stable=True)
        first_G = rows_G.cumsum(0) - rows_G
        rank_N, token_N = rank_TK.flatten()[order_N], order_N // K
        entry_N2 = torch.stack(
            [choice_TK.flatten()[order_N] % self.local, place_GT[rank_N, token_N] - first_G[rank_N]], 1
        )

        sizes_out = torch.stack([rows_G, torch.bincount(rank_N, minlength=self.ranks)], dim=1)
        sizes_in = torch.empty_like(sizes_out)
        self.count("experts", sizes_out)
        dist.all_to_all_single(sizes_in, sizes_out, group=self.group)
        rows_out, entries_out, rows_in, entries_in = torch.cat([sizes_out, sizes_in], dim=1).t().tolist()

        x_RD = self._exchange(x_TD.index_select(0, token_R), rows_in, rows_out)
        weight_N = self._exchange(weight_TK.flatten().index_select(0, order_N), entries_in, entries_out)
        entry_N2 = self._exchange(entry_N2, entries_in, entries_out)

        expert_N, row_N = entry_N2.unbind(dim=1)
        start_G = sizes_in[:, 0].cumsum(0) - sizes_in[:, 0]
        row_N = row_N + start_G.repeat_interleave(sizes_in[:, 1], output_size=row_N.shape[0])
        sorted_N = expert_N.argsort(stable=True)
        entries_R = torch.bincount(row_N, minlength=x_RD.shape[0])
        place_N = torch.arange(sorted_N.shape[0], device=sorted_N.device)
        routed = Routed(
            x_RD=x_RD,
            weight_N=weight_N.index_select(0, sorted_N),
            row_N=row_N.index_select(0, sorted_N),
            position_N=torch.empty_like(sorted_N).scatter_(0, sorted_N, place_N),
            offset_R=entries_R.cumsum(0) - entries_R,
            counts_E=torch.bincount(expert_N, minlength=self.local),
        )
        ranks_T = goes_TG.sum(dim=1)
        sent = _Sent(rows_out, rows_in, token_R.argsort(stable=True), ranks_T.cumsum(0) - ranks_T)
        return routed, sent

    def combine(self, y_RD: Tensor, handle: _Sent) -> Tensor:
        y_RD = self._exchange(y_RD, handle.rows_out, handle.rows_in)
        return F.embedding_bag(handle.position_R, y_RD, handle.offset_T, mode="sum")

    def _exchange(self, x: Tensor, sizes_in: list[int], sizes_out: list[int]) -> Tensor:
        out: Tensor = _AllToAll.apply(x, sizes_in, sizes_out, self)
        return out


class _AllToAll(torch.autograd.Function):
    """Rows to their ranks; the backward sends gradients the way back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sizes_in: list[int], sizes_out: list[int], dispatcher: AllToAllDispatcher
    ) -> Tensor:
        ctx.sizes, ctx.dispatcher, ctx.layer = (sizes_in, sizes_out), dispatcher, dispatcher.layer
        return _all_to_all(x, sizes_in, sizes_out, dispatcher)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        sizes_in, sizes_out = ctx.sizes
        return _all_to_all(g, sizes_out, sizes_in, ctx.dispatcher), None, None, None


def _all_to_all(x: Tensor, sizes_in: list[int], sizes_out: list[int], dispatcher: AllToAllDispatcher) -> Tensor:
    dispatcher.count("experts", x)
    out = x.new_empty(sum(sizes_in), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), sizes_in, sizes_out, group=dispatcher.group)
    return out


def spread_experts(model: nn.Module, mesh: DeviceMesh) -> int:
    """Splits the routed experts of every layer over ``mesh`` (one dimension) and gives the layer its dispatcher.

    Parameters become DTensors, so that whatever wraps, counts or saves them knows that each rank has its own.

    Returns:
        How many layers were split.
    """
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, MoE)]
    for place, layer in layers:
        experts = layer.experts
        for name, p in list(experts.named_parameters(recurse=False)):
            split = distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(experts, name, nn.Parameter(split, requires_grad=p.requires_grad))
        layer.dispatcher = AllToAllDispatcher(mesh.get_group(), layer.gate.experts, layer=place)
        experts.product = _on_own_part(experts.product)
    return len(layers)


def _on_own_part(product: Experts) -> Experts:
    """The product on this rank's experts. Their gradients go through autograd, which makes them DTensors again."""

    def own(routed: Routed, gate_up: Tensor, down: Tensor, *, in_place_grad: bool) -> Tensor:
        assert isinstance(gate_up, DTensor) and isinstance(down, DTensor)
        return product(routed, gate_up.to_local(), down.to_local(), in_place_grad=False)

    return own
