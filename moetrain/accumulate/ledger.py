"""The window's routing statistics, and the place where balance gradients enter the routers.

Every router of the model gets a tap. In a forward the tap *writes* what it saw under (slot, layer), so a recomputed
forward writes the same numbers again and nothing is counted twice. In the backward it adds the balance gradient,
reading its coefficients from the ledger at that moment: what they hold by then is what distinguishes the balance
scopes. Outside a step no tap is attached, so evaluation touches nothing.

Legend: K slots, L routers, E experts, S statistics per router, B rows and T tokens of a micro-batch (T = B x row
length).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from moetrain.accumulate.balance import Balance, Routing
from moetrain.accumulate.denominators import Denominators
from moetrain.accumulate.traffic import Traffic
from moetrain.accumulate.window import Window

if TYPE_CHECKING:
    from collections.abc import Iterator


ALL = slice(None)
NONE = slice(0)


@dataclass(frozen=True)
class Router:
    """One router as the ledger sees it; integrations make these for models that are not ours.

    Attributes:
        name: its place in the model.
        routing: its facts.
        depth: 0 in the main model, k in MTP module k.
        sigmoid: its scores are sigmoids, which balance losses normalise over all experts (V3 paper eq 19).
        plain_balance: balance losses count the plain top-k of the scores instead of the choice (V3 paper eq 18).
        bias: gives the routing bias [E], fp32, or None.
        attach: connects a tap (or None: disconnects).
    """

    name: str
    routing: Routing
    attach: Callable[[Tap | None], None]
    depth: int = 0
    sigmoid: bool = False
    plain_balance: bool = False
    bias: Callable[[], Tensor | None] = lambda: None


def find_routers(model: torch.nn.Module) -> list[Router]:
    """Routers of a model whose gates have an ``observer`` (``moetrain.model.gate``), in the model's order."""
    found = []
    for name, module in model.named_modules():
        if hasattr(module, "observer") and hasattr(module, "plain_balance"):
            found.append(_router_of(name, module))
    return found


def _router_of(name: str, gate: Any) -> Router:
    def attach(tap: Tap | None) -> None:
        gate.observer = tap

    return Router(
        name=name,
        routing=Routing(gate.experts, gate.top_k, gate.groups, gate.top_groups),
        attach=attach,
        depth=gate.depth,
        sigmoid=gate.sigmoid,
        plain_balance=gate.plain_balance,
        bias=lambda: getattr(gate, "e_score_correction_bias", None),
    )


class RoutingLedger:
    """Counts, probability sums and coefficients of one window at a time.

    Args:
        routers: the model's routers; all with the same number of experts.
        balance: the losses and their scope.
        groups: process groups over which tokens are split.
        traffic: counts what is sent.

    Attributes (after ``begin``):
        counts: int64 [K, L, E], routed tokens of this rank that chose each expert.
        slot: the slot whose forward or backward is running; set by who runs it.
        replaying: choices of an earlier forward of the same slot are used again (recompute, second pass).
        gradient_scale: factor on every balance gradient (the loss scale of fp16).
    """

    def __init__(
        self,
        routers: Sequence[Router],
        balance: Balance,
        groups: Sequence[dist.ProcessGroup] = (),
        traffic: Traffic | None = None,
    ) -> None:
        sizes = {r.routing.experts for r in routers}
        if len(sizes) > 1:
            raise ValueError(f"all routers must have the same number of experts, not {sorted(sizes)}")
        self.routers, self.balance, self.groups = list(routers), balance, tuple(groups)
        self.traffic = traffic or Traffic()
        self.experts = sizes.pop() if sizes else 0
        self.taps = [Tap(self, i, router) for i, router in enumerate(self.routers)]
        self.previous: tuple[Tensor, Tensor] | None = None
        self.slot = 0
        self.replaying = False
        self.gradient_scale: Tensor | float = 1.0

    def begin(self, window: Window, denominators: Denominators, dtype: torch.dtype, device: torch.device) -> None:
        """Starts a window. ``dtype`` is that of the statistics, at least fp32."""
        K, L, E = len(window), len(self.routers), self.experts
        width = self.routers[0].routing.width(self.balance) if self.routers else 0
        self.window, self.denominators = window, denominators
        self.counts = torch.zeros(K, L, E, dtype=torch.int64, device=device)
        self.statistics = torch.zeros(K, L, width, dtype=torch.int64, device=device)
        self.probability_sums = torch.zeros(K, L, E, dtype=dtype, device=device)
        self.sequence_values = torch.zeros(K, L, dtype=dtype, device=device)
        self.z_values = torch.zeros(K, L, dtype=dtype, device=device)
        self.coefficients = torch.zeros(K, L, E, dtype=dtype, device=device)
        depths = sorted({r.depth for r in self.routers})
        self._masks = {
            (item.slot, depth): None if (m := item.routed(depth)) is None else m.flatten()
            for item in window
            for depth in depths
        }
        self._choices: dict[tuple[int, int], Tensor] = {}
        self._running = torch.zeros(L, width + 1, dtype=torch.int64, device=device)
        self._dtype = dtype
        self._routed = torch.stack([denominators.routed[r.depth] for r in self.routers]) if L else torch.zeros(0)
        if self.balance.active and self.balance.scope == "previous" and self.previous is not None:
            self._settle(slice(None), *self.previous)

    @contextmanager
    def attached(self) -> Iterator[None]:
        """The taps are in the routers inside, and only there."""
        for router, tap in zip(self.routers, self.taps, strict=True):
            router.attach(tap)
        try:
            yield
        finally:
            for router in self.routers:
                router.attach(None)

    def mask(self, slot: int, depth: int) -> Tensor | None:
        """[T] bool, routed tokens; None = all."""
        return self._masks[slot, depth]

    # -- what f is read from, by scope --------------------------------------------------------------------------------

    def forward_done(self, slot: int, rows: slice = ALL) -> None:
        """Call between a slot's forward and its backward, slot by slot, in the same order on all ranks.

        ``rows``: the routers whose forward it was, where a slot goes through the model in pieces.
        """
        if not self.balance.active or not self.routers[rows]:
            return
        if self.balance.scope == "micro_batch":
            self._settle(slot, self.statistics[slot, rows], self._slot_tokens(slot, rows), rows)
        elif self.balance.scope == "running":
            # counts and their token total travel together, or f would not be a share
            both = torch.cat([self.statistics[slot, rows], self._slot_tokens(slot, rows).unsqueeze(1)], dim=1)
            self.traffic.sum(both, self.groups, "balance")
            self._running[rows] += both
            self._settle(slot, self._running[rows, :-1], self._running[rows, -1], rows)

    def forwards_done(self) -> None:
        """Call when every forward of the window is done, where they all come before the first backward."""
        if self.balance.active and self.balance.scope == "window":
            total = self.traffic.sum(self.statistics.sum(dim=0), self.groups, "balance")
            self._settle(slice(None), total, self._routed)

    def _slot_tokens(self, slot: int, rows: slice) -> Tensor:
        """int64 [rows]: routed tokens of a slot, by router."""
        size = self.window[slot].input_ids.numel()
        tokens = []
        for router in self.routers[rows]:
            mask = self._masks[slot, router.depth]
            tokens.append(self.counts.new_tensor(size) if mask is None else mask.sum())
        return torch.stack(tokens)

    def _settle(self, slot: int | slice, statistics: Tensor, tokens: Tensor, rows: slice = ALL) -> None:
        routing = self.routers[0].routing
        c = routing.coefficients(self.balance, statistics, tokens.to(torch.float64))
        self.coefficients[slot, rows] = (c / self._routed[rows].to(c).clamp(min=1).unsqueeze(1)).to(self._dtype)

    # -- the window's end ---------------------------------------------------------------------------------------------

    def balance_values(self) -> Tensor:
        """[L], this rank's share of each router's balance loss: the number that was optimised."""
        if self.balance.scope == "sequence":
            return self.sequence_values.sum(dim=0)
        return (self.coefficients * self.probability_sums).sum(dim=(0, 2))

    def accept(self, statistics: Tensor) -> None:
        """The step was taken: its global statistics [L, S] become the previous ones."""
        self.previous = (statistics, self._routed)

    def routing_state(self) -> dict[str, Tensor]:
        """The previous step's statistics, for checkpoints."""
        return {} if self.previous is None else {"statistics": self.previous[0], "tokens": self.previous[1]}

    def load_routing_state(self, state: dict[str, Tensor]) -> None:
        """Raises ValueError for the state of other routers or other balance losses."""
        if state:
            routing = self.routers[0].routing if self.routers else None
            want = (len(self.routers), routing.width(self.balance) if routing else 0)
            got = tuple(state["statistics"].shape)
            if got != want and self.balance.scope == "previous":
                raise ValueError(
                    f"the saved routing statistics are {list(got)} [routers, statistics], and this accumulator needs "
                    f"{list(want)}: it is of another model, or of other balance losses"
                )
            if got != want:
                state = {}  # nobody will read it
        self.previous = (state["statistics"], state["tokens"]) if state else None

    # -- choices, for replay ------------------------------------------------------------------------------------------

    def choice(self, row: int, choose: Callable[[], Tensor]) -> Tensor:
        """The slot's choice in this router: made once, then replayed, so that recompute can never route differently."""
        key = (self.slot, row)
        if self.replaying and key in self._choices:
            return self._choices[key].to(torch.int64)
        if not self.replaying and key in self._choices:
            raise ValueError(
                f"router {self.routers[row].name} ran twice in micro-batch {self.slot}: a loss calls the model once "
                "(statistics are per forward); give a second pass a model of its own"
            )
        chosen = choose()
        self._choices[key] = chosen.to(torch.int16 if self.experts < 2**15 else torch.int32)
        return chosen

    @contextmanager
    def replay(self, decisions: Sequence[Tensor] | None = None) -> Iterator[None]:
        """Forwards inside use the choices of earlier ones in the same slots, or those that are given.

        Args:
            decisions: for each slot [L, T, K] integers, the experts of every token in every router (T = rows x row
                length); for instance those of the engine that generated the tokens (reinforcement learning).

        Raises:
            ValueError: decisions that are not for this window and these routers.
        """
        if decisions is not None:
            self._give(decisions)
        before, self.replaying = self.replaying, True
        try:
            yield
        finally:
            self.replaying = before

    def _give(self, decisions: Sequence[Tensor]) -> None:
        if len(decisions) != len(self.window):
            raise ValueError(
                f"routing is given for {len(decisions)} micro-batches, and the window has {len(self.window)}"
            )
        for item, given in zip(self.window, decisions, strict=True):
            want = (len(self.routers), item.input_ids.numel(), self.routers[0].routing.top_k if self.routers else 0)
            if given.is_floating_point():
                raise ValueError(f"routing of micro-batch {item.slot} must be experts' numbers, not {given.dtype}")
            if tuple(given.shape) != want:
                raise ValueError(f"routing of micro-batch {item.slot} must be {list(want)}, not {list(given.shape)}")
            if given.numel():
                experts, sorted_ = min(r.routing.experts for r in self.routers), given.sort(dim=-1).values
                if int(sorted_.min()) < 0 or int(sorted_.max()) >= experts:
                    raise ValueError(f"routing of micro-batch {item.slot} must be experts from 0 to {experts - 1}")
                if bool((sorted_[..., 1:] == sorted_[..., :-1]).any()):
                    raise ValueError(f"routing of micro-batch {item.slot} gives a token the same expert twice")
            for row, choice in enumerate(given.to(self.counts.device).unbind(0)):
                self._choices[item.slot, row] = choice

    @contextmanager
    def backward_of(self, slot: int, rows: slice = ALL) -> Iterator[None]:
        """Around a slot's backward: recompute finds the slot and replays its choices, which are dropped afterwards.

        ``rows``: the routers that are through with the slot then.
        """
        self.slot = slot
        try:
            with self.replay():
                yield
        finally:
            for row in range(len(self.routers))[rows]:
                self._choices.pop((slot, row), None)


class Tap:
    """What one router sees of the ledger (``moetrain.model.gate.GateObserver``)."""

    def __init__(self, ledger: RoutingLedger, row: int, router: Router) -> None:
        self.ledger, self.row, self.router = ledger, row, router

    def logits(self, gate: object, logits_TE: Tensor) -> Tensor:
        if not self.ledger.balance.z_loss:
            return logits_TE
        out: Tensor = _ZLoss.apply(logits_TE, self, self.ledger.slot)
        return out

    def choice(self, gate: object, choose: Callable[[], Tensor]) -> Tensor:
        return self.ledger.choice(self.row, choose)

    def scores(self, gate: object, scores_TE: Tensor, choice_TK: Tensor) -> Tensor:
        ledger, routing = self.ledger, self.router.routing
        slot = ledger.slot
        mask = ledger.mask(slot, self.router.depth)
        tokens = ledger.window[slot].input_ids.numel()
        if choice_TK.shape[0] != tokens:
            raise ValueError(
                f"router {self.router.name} saw {choice_TK.shape[0]} tokens of micro-batch {slot}, which has {tokens}: "
                "a loss gives the model all rows at once"
            )
        ledger.counts[slot, self.row] = routing.counts(choice_TK, mask)[0]
        balance = ledger.balance
        if not balance.active:
            return scores_TE
        s = scores_TE.detach()
        counted = s.topk(routing.top_k, dim=-1, sorted=False).indices if self.router.plain_balance else choice_TK
        p = s / s.sum(dim=-1, keepdim=True) if self.router.sigmoid else s
        if mask is not None:
            p = p * mask.unsqueeze(1)
        own = None
        if balance.scope == "sequence":
            own = self._sequences(p, counted, mask)
        else:
            ledger.statistics[slot, self.row] = routing.statistics(balance, counted, mask)[0]
            ledger.probability_sums[slot, self.row] = p.sum(dim=0)
        out: Tensor = _BalanceGradient.apply(scores_TE, self, slot, own)
        return out

    def _sequences(self, p_TE: Tensor, counted_TK: Tensor, mask_T: Tensor | None) -> Tensor:
        """Coefficients by sequence, [B, E], and the loss' value: mean over sequences of sum f_i P_i."""
        ledger, routing = self.ledger, self.router.routing
        B, T = ledger.window[ledger.slot].input_ids.shape
        statistics = routing.statistics(ledger.balance, counted_TK, mask_T, B)
        if mask_T is None:
            tokens = torch.full((B,), T, dtype=torch.float64, device=p_TE.device)
        else:
            tokens = mask_T.view(B, T).sum(dim=1).to(torch.float64)
        sequences = ledger.denominators.sequences[self.router.depth].clamp(min=1)
        c = routing.coefficients(ledger.balance, statistics, tokens)
        c = (c / (tokens.clamp(min=1) * sequences).unsqueeze(1)).to(p_TE.dtype)
        ledger.sequence_values[ledger.slot, self.row] = (c * p_TE.view(B, T, -1).sum(dim=1)).sum()
        return c


class _BalanceGradient(torch.autograd.Function):
    """Identity on scores [T, E] whose backward adds the balance loss' gradient."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, tap: Tap, slot: int, own_BE: Tensor | None) -> Tensor:
        ctx.save_for_backward(scores, own_BE)
        ctx.tap, ctx.slot = tap, slot
        return scores.view_as(scores)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        s, own_BE = ctx.saved_tensors
        tap: Tap = ctx.tap
        ledger = tap.ledger
        if own_BE is None:
            c = ledger.coefficients[ctx.slot, tap.row].to(s.dtype).unsqueeze(0)
        else:
            c = own_BE.to(s.dtype).repeat_interleave(s.shape[0] // own_BE.shape[0], dim=0)
        if tap.router.sigmoid:
            # the loss is written on s' = s / sum(s): carry its gradient through the normalisation
            total = s.sum(dim=-1, keepdim=True)
            c = (c - (c * s).sum(dim=-1, keepdim=True) / total) / total
        mask = ledger.mask(ctx.slot, tap.router.depth)
        if mask is not None:
            c = c * mask.unsqueeze(1)
        return g + c * ledger.gradient_scale, None, None, None


class _ZLoss(torch.autograd.Function):
    """Identity on logits [T, E]; backward adds the gradient of ``z_loss / N * sum over tokens of logsumexp^2``."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, tap: Tap, slot: int) -> Tensor:
        ledger = tap.ledger
        z = torch.logsumexp(logits, dim=-1)
        mask = ledger.mask(slot, tap.router.depth)
        if mask is not None:
            z = z * mask
        weight = ledger.balance.z_loss / ledger.denominators.routed[tap.router.depth].clamp(min=1)
        ledger.z_values[slot, tap.row] = (weight * z.square().sum()).to(ledger.z_values.dtype)
        ctx.save_for_backward(logits, z, weight)
        ctx.ledger = ledger
        return logits.view_as(logits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        logits, z, weight = ctx.saved_tensors
        c = (2.0 * weight * ctx.ledger.gradient_scale).to(logits.dtype)
        return g + c * z.unsqueeze(1) * logits.softmax(dim=-1), None, None
