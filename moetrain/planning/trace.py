"""What a piece of the model allocates and frees, learnt by running the real code without memory.

The real model is built on the meta device with one block of each kind, and its loss goes forward and backward under the
real ledger, once with fresh gradients and once with gradients that are there. A dispatch mode follows every storage
from its making to its end. The run is cut where blocks, gates and experts begin and end (that is where FSDP2 gathers,
reshards and reduces), so a whole model, a pipeline stage or a sharded one is put together from the pieces
(``moetrain.planning.memory``) without running it.

What has to be said, since values do not exist: each expert gets its even share of entries, and each rank of an expert
group its expected share of rows, times a factor for imbalance.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moetrain.accumulate import Balance, RoutingLedger, Window, count_denominators, find_routers
from moetrain.config.model import ModelConfig
from moetrain.model import Backend, DeepSeek, DeepSeekLoss
from moetrain.model.backends import (
    LOGITS,
    LOGITS_ON_GPU,
    REFERENCE,
    Heads,
    Routed,
    SdpaAttention,
    grouped_mm_experts,
    looped_experts,
    triton_experts,
    triton_route,
)
from moetrain.model.block import Block
from moetrain.model.dispatch import LocalDispatcher
from moetrain.model.gate import Gate, route_by_torch
from moetrain.model.moe import MoE, RoutedExperts
from moetrain.parallel.ep import AllToAllDispatcher, Arrive, AsTheyAre, Leave, Sent, Trip, Wire
from moetrain.parallel.plan import use_fp8
from moetrain.parallel.recompute import recompute_in_backward, recompute_what_is_cheap
from moetrain.planning.tensors import tensors_in
from moetrain.precision import Fp8, Fp8Rows, Reference, Triton

Place = tuple[str, str]  # (unit, role): ("layers.3", "gate"), ("mtp.0", "block"), ("root", "root")


class Stretch(NamedTuple):
    """A run of operators: bytes alive after it minus before, the most above its start on the way, and all that was
    made in it (which says what elementwise operators write)."""

    delta: int
    peak: int
    made: int


class Mark(NamedTuple):
    """``enter`` and ``leave`` a module's forward; ``grad_in``: its backward begins; ``grad_out``: it is through."""

    what: str
    place: Place


Events = tuple[Stretch | Mark, ...]


@dataclass(frozen=True)
class Piece:
    """A part of the model that is passed as one: its events in a forward, in a backward that makes its gradients, and
    in one that adds to them. ``kept``: bytes of quantised weights that its first forward of a window leaves."""

    forward: Events
    backward: Events
    again: Events
    kept: int = 0

    @cached_property
    def made(self) -> tuple[int, int]:
        """Bytes that a forward makes, and a backward."""
        forward, backward = (
            sum(event.made for event in events if isinstance(event, Stretch)) for events in (self.forward, self.again)
        )
        return forward, backward

    @property
    def waits(self) -> tuple[int, int]:
        """Bytes that wait for the backward, and the same for a backward that reads them and makes their gradients."""
        waiting = max(0, _delta(self.forward))
        return waiting, waiting


@dataclass(frozen=True)
class Pieces:
    """``embed``; ``dense`` and ``moe`` blocks (None: the model has none); ``end``: norm, head, multi-token
    prediction, loss."""

    embed: Piece
    dense: Piece | None
    moe: Piece | None
    end: Piece

    def block(self, moe: bool) -> Piece:
        piece = self.moe if moe else self.dense
        assert piece is not None
        return piece


NO_BALANCE = Balance()


@dataclass(frozen=True)
class Kind:
    """All that an allocation depends on.

    Attributes:
        rows, tokens: of one micro-batch.
        dtype: of the computation; ``stored`` of the gates, which are computed in no less than fp32.
        device: whose backend: ``cpu`` or ``cuda``.
        fp8: whose products: None, ``reference`` or ``triton``.
        wire_fp8: whether rows travel in FP8.
        recompute: as in the config.
        in_place: weight gradients are added by the products.
        ep: ranks of an expert group.
        balance: of the ledger.
        imbalance: a rank's entries over the mean.
        cast: FSDP2 casts what goes into a module (half precision).
    """

    rows: int
    tokens: int
    dtype: torch.dtype
    device: str = "cpu"
    experts: str = "torch"
    fp8: str | None = None
    power_of_two: bool = False
    attention_output: str = "e4m3"
    keep_weights: bool = False
    recompute: str = "none"
    in_place: bool = True
    ep: int = 1
    balance: Balance = NO_BALANCE
    imbalance: float = 1.0
    cast: bool = False
    documents: bool = False

    @property
    def reads_counts(self) -> bool:
        """Whether the experts' products read their counts on the host."""
        if self.fp8 is not None:
            return self.fp8 == "reference"
        return self.device == "cpu" or self.dtype != torch.bfloat16


@lru_cache(maxsize=256)
def _pieces(model: str, kind: Kind) -> Pieces:
    return _trace(ModelConfig.model_validate_json(model), kind)


def pieces(model: ModelConfig, kind: Kind) -> Pieces:
    """The pieces of ``model``; the same question is answered from memory."""
    small, _ = one_of_each(model)
    return _pieces(small.model_dump_json(), kind)


def one_of_each(model: ModelConfig) -> tuple[ModelConfig, list[bool]]:
    """``model`` with one block of each kind that it has, and whether each of these has experts."""
    kinds = {model.is_moe_layer(i) for i in range(model.num_hidden_layers)}
    dense = int(False in kinds)
    update = {"num_hidden_layers": len(kinds), "first_k_dense_replace": dense, "moe_layer_freq": 1}
    return model.model_copy(update=update), [False] * dense + [True] * (len(kinds) - dense)


# -- following storages -----------------------------------------------------------------------------------------------


class _Follow(TorchDispatchMode):
    """Bytes of meta storages that are made inside, cut into stretches."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[Stretch | Mark] = []
        self.current = self._start = self._peak = self._made = 0
        self._live: dict[int, tuple[weakref.ref[UntypedStorage], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known: set[int] | None = None
        for tensor in tensors_in(out):
            storage = tensor.untyped_storage()
            key = id(storage)
            entry = self._live.get(key)
            if not tensor.is_meta or (entry is not None and entry[0]() is storage):
                continue
            if known is None:
                known = {id(x.untyped_storage()) for x in tensors_in((args, kwargs))}
            if key in known:
                continue  # a view of something from before
            size = storage.nbytes()
            self._live[key] = (weakref.ref(storage, lambda gone, key=key: self._end(key, gone)), size)  # type: ignore[misc]
            self.current += size
            self._made += size
            self._peak = max(self._peak, self.current)
        return out

    def _end(self, key: int, gone: weakref.ref[UntypedStorage]) -> None:
        entry = self._live.get(key)
        if entry is not None and entry[0] is gone:
            del self._live[key]
            self.current -= entry[1]

    def mark(self, what: str, place: Place) -> None:
        self._close()
        self.events.append(Mark(what, place))

    def _close(self) -> None:
        stretch = Stretch(self.current - self._start, self._peak - self._start, self._made)
        if stretch != (0, 0, 0):
            self.events.append(stretch)
        self._start = self._peak = self.current
        self._made = 0

    def take(self) -> list[Stretch | Mark]:
        self._close()
        events, self.events = self.events, []
        return events


class _After(torch.autograd.Function):
    """Identity on a module's inputs; its backward says that the module's is through (as FSDP2's does)."""

    @staticmethod
    def forward(ctx: Any, done: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.done = done
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.done()
        return None, *gradients


def _watch(module: nn.Module, follow: _Follow, place: Place, cast: torch.dtype | None) -> None:
    """Marks where FSDP2 has its hooks, in its order."""

    def enter(_: nn.Module, args: Any, kwargs: Any) -> Any:
        follow.mark("enter", place)
        if cast is not None:
            args = _mapped(args, lambda x: x.to(cast) if x.is_floating_point() else x)
        if not torch.is_grad_enabled():
            return args, kwargs
        inputs = [x for x in tensors_in(args) if x.requires_grad]
        if inputs:
            outputs = iter(_After.apply(lambda: follow.mark("grad_out", place), *inputs))
            args = _mapped(args, lambda x: next(outputs) if x.requires_grad else x)
        return args, kwargs

    def leave(_: nn.Module, args: Any, output: Any) -> None:
        follow.mark("leave", place)
        if torch.is_grad_enabled():
            begun = False

            def begin(grad: Tensor) -> None:
                nonlocal begun
                if not begun:
                    begun = True
                    follow.mark("grad_in", place)

            for x in tensors_in(output):
                if x.requires_grad:
                    x.register_hook(begin)

    module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
    module.register_forward_hook(leave)


def _mapped(tree: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, tuple):
        items = [_mapped(item, fn) for item in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else tuple(items)
    return tree


# -- stand-ins for what needs values ----------------------------------------------------------------------------------


class FusedAttention(SdpaAttention):
    """What a fused kernel keeps: queries, keys, values, output and one number a query and head."""

    def attend(self, heads: Heads, count: int, scale: float, document_ids: Tensor | None) -> Tensor:
        attention = torch.ops.aten._scaled_dot_product_efficient_attention
        y, *_ = attention(*heads, None, True, 0.0, True, scale=scale)
        out: Tensor = y.transpose(1, 2).flatten(2)
        return out


class _Local(LocalDispatcher):
    """Every expert has its share; the numbers lie on the host, for those who read them."""

    def __init__(self, experts: int, read: bool) -> None:
        super().__init__(experts)
        self.read = read

    def send(self, x_TD: Tensor, choice_TK: Tensor, weight_TK: Tensor) -> Routed:
        routed = super().send(x_TD, choice_TK, weight_TK)
        return routed._replace(counts_E=even(choice_TK.numel(), self.experts)) if self.read else routed


def even(entries: int, experts: int) -> Tensor:
    """int64 [experts], on the host: ``entries`` spread as evenly as whole numbers go."""
    counts = torch.full((experts,), entries // experts)
    counts[: entries % experts] += 1
    return counts


class _Standing(Trip):
    """A trip on which nothing travels."""

    def start(self, x: Tensor, sizes: tuple[list[int], list[int]], *, back: bool = False) -> Tensor:
        sizes_in, _ = sizes[::-1] if back else sizes
        x = x.contiguous()
        out = x.new_empty(sum(sizes_in), *x.shape[1:])
        self._under_way.append((None, x))
        return out

    def land(self) -> None:
        self._under_way.clear()


class _Travel(AllToAllDispatcher):
    """The all-to-all dispatcher with expected sizes; what it keeps and makes is the real one's, line by line."""

    trip: type[Trip] = _Standing

    def __init__(
        self, ranks: int, experts: int, rows_per_token: float, *, wire: Wire | None, imbalance: float, read: bool
    ) -> None:
        self.ranks, self.local, self.layer = ranks, experts // ranks, ""
        self.rows_per_token, self.imbalance, self.read = rows_per_token, imbalance, read
        self.count = lambda kind, sent: None
        self.wire = wire or AsTheyAre()

    def send(self, x_TD: Tensor, choice_TK: Tensor, weight_TK: Tensor) -> Any:
        T, K = choice_TK.shape
        G = self.ranks
        rows_out, entries_out = round(T * self.rows_per_token), T * K
        rows_in, entries_in = round(rows_out * self.imbalance), round(entries_out * self.imbalance)
        rank_TK = choice_TK // self.local
        goes_TG = torch.zeros(T, G, dtype=torch.bool, device=x_TD.device).scatter_(1, rank_TK, True)
        place_GT = (goes_TG.t().flatten().cumsum(0) - 1).view(G, T)
        token_R = choice_TK.new_empty(rows_out)
        order_N = rank_TK.flatten().argsort(stable=True)
        entry_N2 = torch.stack([choice_TK.flatten()[order_N] % self.local, place_GT.flatten()[order_N]], 1)
        sizes = choice_TK.new_empty(G, 2)
        self.exchange(sizes, choice_TK.new_empty(G, 2))
        trip = self.trip(
            self, (_split(rows_in, G), _split(rows_out, G)), (_split(entries_in, G), _split(entries_out, G))
        )
        x_RD, weight_N = Leave.apply(
            x_TD.index_select(0, token_R), weight_TK.flatten().index_select(0, order_N), entry_N2, trip
        )
        ranks_T = goes_TG.sum(dim=1)
        return Sent(trip, x_RD, weight_N, sizes, token_R.argsort(stable=True), ranks_T.cumsum(0) - ranks_T)

    def exchange(self, sizes_in: Tensor, sizes_out: Tensor) -> None:
        """Where rows travel, their numbers do before."""

    def receive(self, sent: Any) -> Routed:
        x_RD, weight_N = Arrive.apply(sent.x_RD, sent.weight_N, sent.trip)
        expert_N, row_N = sent.trip.entry_N2.unbind(dim=1)
        del sent.trip.entry_N2
        row_N = row_N + torch.empty_like(row_N)
        sorted_N = expert_N.argsort(stable=True)
        entries_R = row_N.new_empty(x_RD.shape[0])
        N = row_N.shape[0]
        return Routed(
            x_RD=x_RD,
            weight_N=weight_N.index_select(0, sorted_N),
            row_N=row_N.index_select(0, sorted_N),
            position_N=torch.empty_like(sorted_N),
            offset_R=entries_R.cumsum(0) - entries_R,
            counts_E=even(N, self.local) if self.read else row_N.new_empty(self.local),
        )


class _EvenTravel(_Travel):
    """The same over a process group."""

    trip = Trip

    def __init__(self, group: dist.ProcessGroup, layer: str, *args: Any, **kwargs: Any) -> None:
        super().__init__(group.size(), *args, **kwargs)
        self.group, self.layer = group, layer

    def exchange(self, sizes_in: Tensor, sizes_out: Tensor) -> None:
        self.count("experts", sizes_out)
        dist.all_to_all_single(sizes_in, sizes_out, group=self.group)


def _split(total: int, parts: int) -> list[int]:
    return [total // parts + (i < total % parts) for i in range(parts)]


def rows_per_token(model: ModelConfig, ep: int) -> float:
    """How many ranks of an expert group hold one of a token's experts, on average, if experts are chosen evenly.

    With group-limited routing (V3 paper 2.1.2) the choice lies in ``topk_group`` of ``n_group`` runs of experts.
    """
    E, K, each = model.n_routed_experts, model.num_experts_per_tok, model.n_routed_experts // ep
    run = E // model.n_group
    allowed = model.topk_group * run
    missed = 0.0  # that a rank has none of a token's experts
    # a rank holds parts of runs: `parts` of them, each `width` experts wide
    width = min(each, run)
    parts = max(1, each // run)
    for j in range(min(parts, model.topk_group) + 1):
        ways = math.comb(parts, j) * math.comb(model.n_group - parts, model.topk_group - j)
        share = ways / math.comb(model.n_group, model.topk_group)
        if share:
            missed += share * math.comb(allowed - j * width, K) / math.comb(allowed, K)
    return ep * (1.0 - missed)


# -- the run ----------------------------------------------------------------------------------------------------------


def _build(config: ModelConfig, kind: Kind) -> DeepSeek:
    with torch.device("meta"):
        model = DeepSeek(config).to(kind.dtype)
    high = torch.promote_types(kind.dtype, torch.float32)
    experts: Any = looped_experts
    attention = REFERENCE.attention if kind.device == "cpu" else FusedAttention()
    if kind.device == "cuda" and kind.dtype == torch.bfloat16:
        experts = triton_experts if kind.experts == "triton" else grouped_mm_experts
    route = triton_route if experts is triton_experts else route_by_torch
    model.use_backend(Backend(attention, experts, "", LOGITS if kind.device == "cpu" else LOGITS_ON_GPU, route))
    if kind.fp8 is not None:
        products = Reference() if kind.fp8 == "reference" else Triton()
        fp8 = Fp8(
            products,
            power_of_two=kind.power_of_two,
            attention_output=kind.attention_output,  # type: ignore[arg-type]
            keep_weights=kind.keep_weights,
        )
        use_fp8(model, fp8)
    for module in model.modules():
        if isinstance(module, Gate):
            module.weight = nn.Parameter(module.weight.to(high))
        elif isinstance(module, MoE):
            module.dispatcher = even_dispatcher(config, kind)
            if kind.ep > 1:
                _keep_share(module.experts, kind.ep)
    model.set_in_place_gradients(kind.in_place)
    blocks: list[Any] = [*model.layers, *(module.block for module in model.mtp)]
    for block in blocks:
        if kind.recompute == "full":
            recompute_in_backward(block)
        elif kind.recompute == "selective":
            recompute_what_is_cheap(block)
    return model


def even_dispatcher(config: ModelConfig, kind: Kind, *, over: AllToAllDispatcher | None = None) -> Any:
    """Spreads tokens evenly where routing would have to be read; ``over``: really, with this one's group."""
    counts: Any = {"imbalance": kind.imbalance, "read": kind.reads_counts}
    if kind.ep == 1:
        return _Local(config.n_routed_experts, kind.reads_counts)
    per_token = rows_per_token(config, kind.ep)
    if over is not None:
        return _EvenTravel(over.group, over.layer, config.n_routed_experts, per_token, wire=over.wire, **counts)
    wire = Fp8Rows() if kind.fp8 is not None else None
    return _Travel(kind.ep, config.n_routed_experts, per_token, wire=wire, **counts)


def _keep_share(experts: RoutedExperts, ep: int) -> None:
    for name, p in list(experts.named_parameters(recurse=False)):
        setattr(experts, name, nn.Parameter(p.new_empty(p.shape[0] // ep, *p.shape[1:])))


def _place(name: str, module: nn.Module) -> Place | None:
    roles = {Block: "block", Gate: "gate", RoutedExperts: "experts"}
    role = next((role for kind, role in roles.items() if isinstance(module, kind)), None)
    return None if role is None else (".".join(name.split(".")[:2]), role)


def _trace(config: ModelConfig, kind: Kind) -> Pieces:
    model = _build(config, kind)
    follow = _Follow()
    cast = kind.dtype if kind.cast else None
    for name, module in model.named_modules():
        place = _place(name, module)
        if place is not None:
            _watch(module, follow, place, cast if place[1] == "block" else None)
    loss = DeepSeekLoss(config)
    ledger = RoutingLedger(find_routers(model), kind.balance)
    item = {
        name: torch.zeros(kind.rows, kind.tokens, dtype=torch.int64, device="meta") for name in ("input_ids", "labels")
    }
    if kind.documents:
        item["document_ids"] = torch.zeros_like(item["input_ids"])
    window = Window([item, item])
    device, stat = torch.device("meta"), torch.promote_types(kind.dtype, torch.float32)
    counts = count_denominators(window, depths=config.num_nextn_predict_layers, device=device)
    ledger.begin(window, counts, stat, device)
    scale = torch.ones(len(loss.depths), device="meta")
    passes: list[tuple[list[Stretch | Mark], list[Stretch | Mark]]] = []
    with ledger.attached(), follow:
        for slot, micro_batch in enumerate(window):
            ledger.slot = slot
            terms = loss(model, micro_batch)
            ledger.forward_done(slot)
            forward = follow.take()
            with ledger.backward_of(slot):
                total = (terms * scale).sum()
                del terms
                total.backward()
            del total
            passes.append((forward, follow.take()))
    # the first pass makes gradients, the second adds to them
    (first, backward), (forward, again) = passes
    layers = [f"layers.{i}" for i in range(config.num_hidden_layers)]
    forwards, backwards, agains = (
        _by_forward(forward, layers),
        _by_backward(backward, layers),
        _by_backward(again, layers),
    )
    kept = [_delta(a) - _delta(b) for a, b in zip(_by_forward(first, layers), forwards, strict=True)]
    embed, *blocks, end = (
        Piece(tuple(f), tuple(b), tuple(a), k) for f, b, a, k in zip(forwards, backwards, agains, kept, strict=True)
    )
    _, moe = one_of_each(config)
    kinds = dict(zip(moe, blocks, strict=True))
    return Pieces(embed, kinds.get(False), kinds.get(True), end)


def _delta(events: Iterable[Stretch | Mark]) -> int:
    return sum(event.delta for event in events if isinstance(event, Stretch))


def _by_forward(events: Iterable[Stretch | Mark], layers: list[str]) -> list[list[Stretch | Mark]]:
    """Cut before each block's ``enter``, and after the last one's ``leave``."""
    parts: list[list[Stretch | Mark]] = [[]]
    for event in events:
        if isinstance(event, Mark) and event.place[1] == "block" and event.place[0] in layers:
            if event.what == "enter":
                parts.append([])
            elif event.what == "leave" and event.place[0] == layers[-1]:
                parts[-1].append(event)
                parts.append([])
                continue
        parts[-1].append(event)
    return parts


def _by_backward(events: Iterable[Stretch | Mark], layers: list[str]) -> list[list[Stretch | Mark]]:
    """The same pieces in the same order: cut before each block's ``grad_in`` and after the first one's ``grad_out``."""
    parts: list[list[Stretch | Mark]] = [[]]
    for event in events:
        if isinstance(event, Mark) and event.place[1] == "block" and event.place[0] in layers:
            if event.what == "grad_in":
                parts.append([])
            elif event.what == "grad_out" and event.place[0] == layers[0]:
                parts[-1].append(event)
                parts.append([])
                continue
        parts[-1].append(event)
    return parts[::-1]
