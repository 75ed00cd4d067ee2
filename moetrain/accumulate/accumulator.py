"""One optimizer step from one window, the same step whatever the layout.

Read ``MoEAccumulator.step`` top to bottom: count, run the micro-batches, reduce once, one verdict, step, bias, report.
It knows neither configs nor logs, and nothing in it waits for the device until the verdict at the window's end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moetrain.accumulate.balance import Balance, update_bias
from moetrain.accumulate.denominators import Denominators, count_denominators, sum_over
from moetrain.accumulate.ledger import Router, RoutingLedger, find_routers
from moetrain.accumulate.losses import Loss, causal_lm_loss
from moetrain.accumulate.owners import GradientOwner, owner_of
from moetrain.accumulate.report import StepReport
from moetrain.accumulate.window import Window


class Scheduler(Protocol):
    """Anything with torch's scheduler verb; called once per accepted step."""

    def step(self) -> None: ...


class MoEAccumulator:
    """Runs windows as exact optimizer steps.

    Args:
        model: a module, plain or wrapped in DistributedDataParallel or FSDP2.
        optimizer: steps the model's parameters.
        loss: gives sums per micro-batch (see ``Loss``).
        balance: balance losses and the routing bias' rate; None = neither.
        max_norm: clip the global gradient norm to this; None = no clipping.
        scheduler: stepped once per accepted step.
        groups: process groups over which tokens are split; default: all processes, where there are any.
        routers: the model's routers; default: found by ``find_routers``.
        reduce: when gradients are summed over ranks: once per ``window`` or in each ``micro_batch``.
        skip_if: given the gradient norm, a reason to discard the window, or None.
        owner: who holds the gradients; default: chosen by the model's wrapper.

    A window whose loss or gradient norm is not finite is discarded on every rank: weights, optimizer state, scheduler,
    bias and statistics stay as they were.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss: Loss = causal_lm_loss,
        balance: Balance | None = None,
        max_norm: float | None = None,
        scheduler: Scheduler | None = None,
        groups: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None = None,
        routers: Sequence[Router] | None = None,
        reduce: str = "window",
        skip_if: Callable[[float], str | None] | None = None,
        owner: GradientOwner | None = None,
    ) -> None:
        if reduce not in ("window", "micro_batch"):
            raise ValueError(f"reduce must be 'window' or 'micro_batch', not {reduce!r}")
        if max_norm is not None and not 0.0 < max_norm < math.inf:
            raise ValueError(f"max_norm must be a positive number, or None for no clipping, not {max_norm}")
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.balance = balance or Balance()
        self.bias_rate = self.balance.bias_rate  # may follow a schedule between steps
        self.max_norm, self.scheduler, self.skip_if = max_norm, scheduler, skip_if
        self.groups = _groups(groups)
        self.ledger = RoutingLedger(find_routers(model) if routers is None else routers, self.balance, self.groups)
        self.owner = owner or owner_of(model, optimizer, self.groups, every_micro_batch=reduce == "micro_batch")
        if self.balance.active and not self.ledger.routers:
            raise ValueError("a balance loss needs routers, and the model has none that this library knows")

    def step(self, window: Window) -> StepReport:
        """One optimizer step on this rank's ``window``; every rank gives as many micro-batches.

        Gradients are the step's own: what is in ``.grad`` before (a window that an exception ended) is dropped.
        """
        parameter = next(self.model.parameters())
        device = parameter.device
        if not isinstance(window, Window):
            raise ValueError("step takes a Window: Window(micro_batches), or windows(loader, micro_batches=...)")
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        window = window.to(device)
        depths = max([*self.loss.depths, *(r.depth for r in self.ledger.routers)], default=0)
        counts = count_denominators(window, depths=depths, groups=self.groups, device=device)
        scale = self._scale(counts, dtype)

        self.ledger.begin(window, counts, dtype, device)
        forwards_first = self.balance.active and self.balance.scope == "window"
        self.owner.begin(all_forwards_first=forwards_first)
        with self.ledger.attached():
            if forwards_first:
                sums = self._all_forwards_first(window, scale)
            else:
                sums = self._one_by_one(window, scale)
        self.owner.reduce()

        report, statistics = self._report(sums, scale, counts)
        accepted = report.skipped is None
        if accepted:
            self.owner.step()
            self._move_bias(report.load)
            self.ledger.accept(statistics)
            if self.scheduler is not None:
                self.scheduler.step()
        self.owner.discard()
        return report

    # -- the two orders -----------------------------------------------------------------------------------------------

    def _one_by_one(self, window: Window, scale: Tensor) -> Tensor:
        """Forward and backward of each micro-batch in turn. Returns the loss sums of this rank, [n_terms]."""
        sums = torch.zeros_like(scale)
        for item in window:
            self.ledger.slot = item.slot
            with self.owner.micro_batch(last=item.slot == len(window) - 1):
                terms = self.loss(self.model, item).to(scale.dtype)
                self.ledger.forward_done(item.slot)
                with self.ledger.backward_of(item.slot):
                    self.owner.backward((terms * scale).sum())
            sums += terms.detach()
        return sums

    def _all_forwards_first(self, window: Window, scale: Tensor) -> Tensor:
        """Every forward before the first backward: the ledger is complete when gradients start."""
        held = []
        for item in window:
            self.ledger.slot = item.slot
            with self.owner.micro_batch(last=False):
                held.append(self.loss(self.model, item).to(scale.dtype))
        self.ledger.forwards_done()
        sums = torch.stack([terms.detach() for terms in held]).sum(dim=0)
        for slot in range(len(window)):
            with self.owner.micro_batch(last=slot == len(window) - 1), self.ledger.backward_of(slot):
                terms, held[slot] = held[slot], sums  # drop the graph with its backward
                self.owner.backward((terms * scale).sum())
        return sums

    # -- the window's end ---------------------------------------------------------------------------------------------

    def _scale(self, counts: Denominators, dtype: torch.dtype) -> Tensor:
        """[n_terms]: weight over denominator; 0 where there is nothing to divide by."""
        valid = counts.valid[list(self.loss.depths)]
        weights = torch.tensor(tuple(self.loss.weights), dtype=torch.float64, device=valid.device)
        return (weights / valid.clamp(min=1)).to(dtype)

    def _report(self, sums: Tensor, scale: Tensor, counts: Denominators) -> tuple[StepReport, Tensor]:
        """Reduces what was counted, clips, and judges; the one place of a step that waits for the device."""
        ledger = self.ledger
        load = ledger.counts.sum(dim=0)
        statistics = ledger.statistics.sum(dim=0)
        parts = [sums, ledger.balance_values(), ledger.z_values.sum(dim=0), load, statistics]
        packed = torch.cat([p.to(torch.float64).flatten() for p in parts])
        sum_over(packed, self.groups)
        sums, balance, z, load, statistics = (
            flat.view(p.shape) for flat, p in zip(packed.split([p.numel() for p in parts]), parts, strict=True)
        )
        weights = torch.tensor(tuple(self.loss.weights), dtype=torch.float64, device=sums.device)
        values = sums / counts.valid[list(self.loss.depths)].clamp(min=1)
        losses = dict(zip(self.loss.names, values, strict=True))
        total = (values * weights).sum()
        if self.balance.active:
            losses["balance"] = balance.sum()
            total = total + losses["balance"]
        if self.balance.z_loss:
            losses["z"] = z.sum()
            total = total + losses["z"]

        norm = self.owner.norm()
        norm_value, total_value = torch.stack([norm.to(torch.float64), total]).tolist()
        skipped = self._verdict(norm_value, total_value)
        if skipped is None and self.max_norm is not None and norm_value > self.max_norm:
            self.owner.scale(self.max_norm / (norm_value + 1e-6))
        report = StepReport(
            losses=losses,
            total=total,
            grad_norm=norm,
            valid_tokens=counts.valid[0],
            routed_tokens=counts.routed[0],
            load=load.to(torch.int64),
            skipped=skipped,
            learning_rate=float(self.optimizer.param_groups[0]["lr"]),
        )
        return report, statistics.to(torch.int64)

    def _verdict(self, norm: float, total: float) -> str | None:
        """The same on every rank, since both numbers are."""
        if not math.isfinite(total):
            return f"the loss is {total}"
        if not math.isfinite(norm):
            return f"the gradient norm is {norm}"
        return self.skip_if(norm) if self.skip_if is not None else None

    def _move_bias(self, load: Tensor) -> None:
        if not self.bias_rate:
            return
        for router, load_E in zip(self.ledger.routers, load, strict=True):
            bias = router.bias()
            if bias is not None:
                update_bias(bias, load_E, self.bias_rate, zero_centred=self.balance.zero_centred)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides model, optimizer and scheduler."""
        return {"routing": self.ledger.routing_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ledger.load_routing_state(state["routing"])


def _groups(groups: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None) -> tuple[dist.ProcessGroup, ...]:
    if groups is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return (dist.group.WORLD,)  # type: ignore[return-value]
        return ()
    if isinstance(groups, Sequence):
        return tuple(groups)
    return (groups,)
