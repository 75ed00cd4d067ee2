"""Expert parallelism: each rank of an expert group holds a run of neighbouring experts, and tokens travel to them.

A token travels once to every rank that holds at least one of its experts, however many it has there, and comes back as
one row: the experts of a rank are summed where they are. Expert groups lie on ranks in order, so with V3's node-limited
routing (paper 2.1.2) that is at most ``topk_group`` rows per token where each group is a rank (``reach``).

Nobody waits for rows that are on their way: the layer's shared experts run until they are here. So they do in the
backward, since autograd takes what was computed last first: gradients of rows leave, the shared experts' backward
runs, and only then is waited for what comes back.

Legend: T tokens, K experts per token, D width, G ranks of the expert group, E experts, F experts of one rank, R rows
that travel, N entries (row, expert).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from moetrain.config.model import ModelConfig
from moetrain.model.backends import Experts, Routed
from moetrain.model.dispatch import Dispatcher
from moetrain.model.moe import MoE

#: told of every tensor that is sent, and under which name
Count = Callable[[Literal["experts"], Tensor], None]


class Wire(Protocol):
    """What rows are while they travel to experts (and their gradients, before the down product)."""

    def encode(self, x_RD: Tensor, *, gradient: bool) -> Tensor: ...

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        """-> [R, D], with the dtype and width of ``like``."""
        ...


class AsTheyAre:
    """Rows in the dtype of the computation."""

    def encode(self, x_RD: Tensor, *, gradient: bool) -> Tensor:
        return x_RD

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        return sent


class Sent(NamedTuple):
    """What is under way, and what ``receive`` and ``combine`` need, such as the places of each token's rows."""

    trip: Trip
    x_RD: Tensor
    weight_N: Tensor
    sizes_G2: Tensor
    position_R: Tensor
    offset_T: Tensor


class AllToAllDispatcher:
    """``moetrain.model.dispatch.Dispatcher`` over a process group; any number of rows per rank, also none.

    The row counts are read on the host once per layer, since the sizes of what is received follow from them.

    Args:
        group: the expert group; rank g of it holds experts g * F .. (g + 1) * F - 1.
        experts: E, a multiple of the group's size.
        layer: its place in the model, for messages.
        wire: what rows are while they travel.
    """

    def __init__(self, group: dist.ProcessGroup, experts: int, *, layer: str = "", wire: Wire | None = None) -> None:
        self.group, self.ranks, self.layer = group, group.size(), layer
        self.local = experts // self.ranks
        self.wire = wire or AsTheyAre()
        self.count: Count = lambda kind, sent: None

    def send(self, x_TD: Tensor, choice_TK: Tensor, weight_TK: Tensor) -> Sent:
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

        trip = Trip(self, (rows_in, rows_out), (entries_in, entries_out))
        x_RD, weight_N = Leave.apply(
            x_TD.index_select(0, token_R), weight_TK.flatten().index_select(0, order_N), entry_N2, trip
        )
        ranks_T = goes_TG.sum(dim=1)
        return Sent(trip, x_RD, weight_N, sizes_in, token_R.argsort(stable=True), ranks_T.cumsum(0) - ranks_T)

    def receive(self, sent: Sent) -> Routed:
        x_RD, weight_N = Arrive.apply(sent.x_RD, sent.weight_N, sent.trip)
        expert_N, row_N = sent.trip.entry_N2.unbind(dim=1)
        del sent.trip.entry_N2
        rows_G, entries_G = sent.sizes_G2.unbind(dim=1)
        row_N = row_N + (rows_G.cumsum(0) - rows_G).repeat_interleave(entries_G, output_size=row_N.shape[0])
        return by_expert(x_RD, weight_N, expert_N, row_N, self.local)

    def combine(self, y_RD: Tensor, sent: Sent) -> Tensor:
        y_RD = Return.apply(y_RD, sent.trip)
        return F.embedding_bag(sent.position_R, y_RD, sent.offset_T, mode="sum")


def reach(config: ModelConfig, ranks: int) -> int:
    """How many of the expert group's ranks a token goes to at most; neighbours hold neighbouring experts."""
    of_rank, of_group = config.n_routed_experts // ranks, config.n_routed_experts // config.n_group
    firsts = range(0, config.n_routed_experts, of_group)
    widths = sorted((first + of_group - 1) // of_rank - first // of_rank + 1 for first in firsts)
    return min(ranks, config.num_experts_per_tok, sum(widths[-config.topk_group :]))


def by_expert(x_RD: Tensor, weight_N: Tensor, expert_N: Tensor, row_N: Tensor, experts: int) -> Routed:
    """Rows that have arrived and their entries (expert, row) in any order, as this rank's experts take them."""
    sorted_N = expert_N.argsort(stable=True)
    place_N = torch.empty_like(sorted_N)
    place_N[sorted_N] = torch.arange(sorted_N.shape[0], device=sorted_N.device)
    entries_R = torch.bincount(row_N, minlength=x_RD.shape[0])
    return Routed(
        x_RD=x_RD,
        weight_N=weight_N.index_select(0, sorted_N),
        row_N=row_N.index_select(0, sorted_N),
        position_N=place_N,
        offset_R=entries_R.cumsum(0) - entries_R,
        counts_E=torch.bincount(expert_N, minlength=experts),
    )


class Trip:
    """Rows, weights and places of one layer's forward on their way to experts, and the gradients' way back."""

    collective = "all_to_all_single"  # and the layer: for messages (moetrain.observe.stuck)

    def __init__(
        self,
        dispatcher: AllToAllDispatcher,
        rows: tuple[list[int], list[int]],
        entries: tuple[list[int], list[int]],
    ) -> None:
        self.dispatcher, self.layer = dispatcher, dispatcher.layer
        self.rows, self.entries = rows, entries
        self.out: tuple[Tensor, Tensor, Tensor]  # rows, weights and places, once they have left
        self.entry_N2: Tensor  # the places, once they are here
        self.back: tuple[Tensor, Tensor]  # gradients of rows and weights
        self._under_way: list[tuple[Any, Tensor]] = []

    def start(self, x: Tensor, sizes: tuple[list[int], list[int]], *, back: bool = False) -> Tensor:
        """Lets x leave; what is returned is not filled before ``land``."""
        sizes_in, sizes_out = sizes[::-1] if back else sizes
        x = x.contiguous()
        out = x.new_empty(sum(sizes_in), *x.shape[1:])
        self.dispatcher.count("experts", x)
        work = dist.all_to_all_single(out, x, sizes_in, sizes_out, group=self.dispatcher.group, async_op=True)
        self._under_way.append((work, x))  # x has to be there until it has left
        return out

    def land(self) -> None:
        for work, _ in self._under_way:
            work.wait()
        self._under_way.clear()


class Leave(torch.autograd.Function):
    """Rows and weights leave; what autograd is given for them says only their shape.

    Backward, their gradients are on the way since ``Arrive``'s, and land.
    """

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weight_N: Tensor, entry_N2: Tensor, trip: Trip) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        rows = trip.start(trip.dispatcher.wire.encode(x_RD, gradient=False), trip.rows)
        trip.out = rows, trip.start(weight_N, trip.entries), trip.start(entry_N2, trip.entries)
        return x_RD.new_empty(1, 1).expand(rows.shape[0], x_RD.shape[1]), weight_N.new_empty(1).expand(len(trip.out[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *shapes: Tensor) -> tuple[Tensor, Tensor, None, None]:
        ctx.trip.land()
        dx, dweight = ctx.trip.back
        del ctx.trip.back
        return dx, dweight, None, None


class Arrive(torch.autograd.Function):
    """Rows and weights are here. Backward, their gradients leave, and autograd is given what has their shape."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weight_N: Tensor, trip: Trip) -> tuple[Tensor, Tensor]:
        ctx.trip = trip
        trip.land()
        rows, weights, trip.entry_N2 = trip.out
        del trip.out  # what is returned leads back to this trip: held here too, none of it would ever be freed
        return trip.dispatcher.wire.decode(rows, x_RD), weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, dweight_N: Tensor) -> tuple[Tensor, Tensor, None]:
        trip = ctx.trip
        trip.back = trip.start(dx, trip.rows, back=True), trip.start(dweight_N, trip.entries, back=True)
        return dx, dweight_N, None


class Return(torch.autograd.Function):
    """The experts' sums go back to their tokens; backward, the gradients travel as rows did."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, trip: Trip) -> Tensor:
        ctx.trip = trip
        out = trip.start(y, trip.rows, back=True)
        trip.land()
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        trip, wire = ctx.trip, ctx.trip.dispatcher.wire
        sent = trip.start(wire.encode(g, gradient=True), trip.rows)
        trip.land()
        return wire.decode(sent, g), None


def spread_experts(
    model: nn.Module, mesh: DeviceMesh, dispatcher: Callable[[str, int], Dispatcher], *, plain: bool = False
) -> int:
    """Splits the routed experts of every layer over ``mesh`` (one dimension) and gives the layer its dispatcher.

    ``dispatcher`` makes it, given the layer's place and how many experts it has. Parameters become DTensors, so that
    whatever wraps, counts or saves them knows that each rank has its own; or, ``plain``, this rank's part of them.

    Returns:
        How many layers were split.
    """
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, MoE)]
    for place, layer in layers:
        experts = layer.experts
        for name, p in list(experts.named_parameters(recurse=False)):
            split: Tensor
            if plain:
                split = p.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
            else:
                split = distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(experts, name, nn.Parameter(split, requires_grad=p.requires_grad))
        layer.dispatcher = dispatcher(place, layer.gate.experts)
        if not plain:
            experts.product = _on_own_part(experts.product)
    return len(layers)


def _on_own_part(product: Experts) -> Experts:
    """The product on this rank's experts, and their gradients as DTensors, like the parameters."""

    def own(routed: Routed, gate_up: Tensor, down: Tensor, *, in_place_grad: bool) -> Tensor:
        assert isinstance(gate_up, DTensor) and isinstance(down, DTensor)
        if in_place_grad:
            return product(routed, OwnPart.of(gate_up), OwnPart.of(down), in_place_grad=True)
        return product(routed, gate_up.to_local(), down.to_local(), in_place_grad=False)

    return own


class OwnPart(Tensor):
    """This rank's part of a DTensor parameter, for products that add to ``.grad``: that is the parameter's own, so it
    does not matter how many graphs hold a part of it, nor in which order their backwards run."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as of Parameter
    whole: DTensor

    @classmethod
    def of(cls, whole: DTensor) -> OwnPart:
        with torch.no_grad():
            part = Tensor._make_subclass(cls, whole.to_local(), whole.requires_grad)
        part.whole = whole
        return part

    @property
    def grad(self) -> Tensor | None:
        grad = self.whole.grad
        return grad.to_local() if isinstance(grad, DTensor) else None

    @grad.setter
    def grad(self, grad: Tensor | None) -> None:
        assert grad is not None  # products make and add; whoever forgets gradients asks the parameter
        whole = self.whole
        whole.grad = DTensor.from_local(
            grad, whole.device_mesh, whole.placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
