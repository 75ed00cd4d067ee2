"""One optimizer step from one window, the same step whatever the layout.

Read ``MoEAccumulator.step`` top to bottom: count, run the micro-batches, reduce once, one verdict, step, bias, report.
It knows neither configs nor logs, and nothing in it waits for the device until the verdict at the window's end.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal, Protocol, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moetrain.accumulate.balance import Balance, check_bias, update_bias
from moetrain.accumulate.denominators import Denominators, count_denominators, local_counts
from moetrain.accumulate.held import HostMemory
from moetrain.accumulate.ledger import Router, RoutingLedger, find_routers
from moetrain.accumulate.loss_scale import LossScale
from moetrain.accumulate.losses import Loss, causal_lm_loss
from moetrain.accumulate.noise import gradient_noise, part_statistics
from moetrain.accumulate.owners import GradientOwner, Stages, owner_of
from moetrain.accumulate.report import StepReport
from moetrain.accumulate.traffic import Traffic
from moetrain.accumulate.window import MicroBatch, Window

WindowOrder = Literal["forwards_first", "counting_pass"]


class Scheduler(Protocol):
    """Anything with torch's scheduler verb; called once per accepted step."""

    def step(self) -> None: ...


class Pipeline(Protocol):
    """Runs micro-batches through stages, of which this rank holds some.

    Attributes:
        stages: how the parameters are spread.
        routers: the whole model's; those of other ranks are never attached to anything.
        all_forwards_first: the schedule's own order.
        traffic: counts what stages send; the accumulator gives its own.
        held: the context of a forward; the accumulator gives its own.
    """

    traffic: Traffic
    held: Callable[[torch.device], AbstractContextManager[Any]]

    @property
    def stages(self) -> Stages: ...

    @property
    def routers(self) -> Sequence[Router]: ...

    @property
    def all_forwards_first(self) -> bool: ...

    def fill(self, window: Window) -> Window:
        """The window with as many empty rows and micro-batches as the schedule needs."""
        ...

    def forward(self, window: Window, ledger: RoutingLedger | None = None) -> Tensor:
        """Without gradient; loss sums, [n_terms], zeros where this rank does not hold the head."""
        ...

    def run(self, window: Window, scale: Tensor, ledger: RoutingLedger) -> Tensor:
        """Every forward and backward of ``sum(sums * scale)``; returns the same sums."""
        ...


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
        skip_if: given the gradient norm, a reason to discard the window (or True), or None (or False).
        window_order: how scope ``window`` knows the global counts before the first backward: all ``forwards_first``
            (memory of K forwards; of K times the block inputs where blocks are recomputed), or a ``counting_pass``
            without gradient, whose routing is replayed (memory of one forward, and one forward more).
        offload_activations: on a GPU, what waits for its backward waits in host memory.
        device: where micro-batches are computed; default: where the first trained parameter is.
        loss_scale: dynamic scaling for fp16.
        measure_noise: estimate the gradient noise scale from norms before and after the reduction; on one process
            without groups from the first micro-batch and the whole window.
        pipeline: runs the micro-batches where the model is cut into stages.
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
        skip_if: Callable[[float], str | bool | None] | None = None,
        window_order: WindowOrder = "forwards_first",
        offload_activations: bool = False,
        device: torch.device | None = None,
        loss_scale: LossScale | None = None,
        measure_noise: bool = False,
        pipeline: Pipeline | None = None,
        owner: GradientOwner | None = None,
    ) -> None:
        self._check(model, optimizer, loss, scheduler, owned=owner is not None)
        if not isinstance(balance, Balance | None):
            raise ValueError(f"balance must be a moetrain.Balance, such as Balance(alpha=1e-4), not {balance!r}")
        if routers is not None and not (
            isinstance(routers, Sequence) and all(isinstance(router, Router) for router in routers)
        ):
            raise ValueError("routers must be a list of Router: find_routers(model) or transformers_routers(model)")
        if reduce not in ("window", "micro_batch"):
            raise ValueError(f"reduce must be 'window' or 'micro_batch', not {reduce!r}")
        if max_norm is not None and not (isinstance(max_norm, int | float) and 0.0 < max_norm < math.inf):
            raise ValueError(f"max_norm must be a positive number, or None for no clipping, not {max_norm!r}")
        if window_order not in get_args(WindowOrder):
            raise ValueError(f"window_order must be one of {', '.join(get_args(WindowOrder))}, not {window_order!r}")
        if measure_noise and reduce == "micro_batch":
            raise ValueError("measure_noise needs reduce='window': per micro-batch no rank ever has its own gradient")
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self._balance = balance or Balance()
        self.bias_rate = self.balance.bias_rate  # may follow a schedule between steps
        self.max_norm, self.scheduler, self.skip_if = max_norm, scheduler, skip_if
        self.groups = _groups(groups)
        self.window_order, self.loss_scale = window_order, loss_scale
        self.host_memory = HostMemory() if offload_activations else None
        self.device = device
        self._ended_by: str | None = None
        self.traffic = Traffic()
        self.pipeline = pipeline
        if routers is None:
            routers = find_routers(model) if pipeline is None else pipeline.routers
        self.ledger = RoutingLedger(routers, self.balance, self.groups, self.traffic)
        self.owner = owner or owner_of(
            model,
            optimizer,
            self.groups,
            every_micro_batch=reduce == "micro_batch",
            stages=None if pipeline is None else pipeline.stages,
        )
        self.owner.traffic, self.owner.measures, self.owner.device = self.traffic, measure_noise, device
        if pipeline is not None:
            pipeline.traffic, pipeline.held = self.traffic, self._held
        for module in model.modules():
            dispatcher: Any = getattr(module, "dispatcher", None)
            if hasattr(dispatcher, "count"):  # one that sends tokens to other ranks
                dispatcher.count = self.traffic.count
                if measure_noise:
                    raise ValueError(
                        "measure_noise needs each rank's own gradient, and experts spread over ranks have that of all"
                    )
        if (self.balance.active or self.balance.z_loss) and not self.ledger.routers:
            raise ValueError(
                "a balance loss needs routers, and the model has none that this library knows; for a model of "
                "transformers give routers=transformers_routers(model)"
            )
        biased = pipeline is not None or any(router.bias() is not None for router in self.ledger.routers)
        if self.bias_rate and not biased:
            raise ValueError("bias_rate moves a routing bias, and no router of the model has one: set it to 0")
        deepest = max((r.depth for r in self.ledger.routers), default=0)
        if deepest > max(loss.depths):
            warnings.warn(
                f"the model predicts {deepest} more token{'s' if deepest > 1 else ''} ahead than the loss asks for, so "
                "its multi-token-prediction modules are not trained; give loss=moetrain.model.DeepSeekLoss(config)",
                stacklevel=2,
            )

    @staticmethod
    def _check(
        model: nn.Module, optimizer: torch.optim.Optimizer, loss: Loss, scheduler: object, *, owned: bool
    ) -> None:
        """Parts that would give a wrong step, or fail in the middle of one; ``owned``: an owner knows what is
        stepped."""
        for part in (optimizer, scheduler):
            if type(part).__module__.startswith("accelerate."):
                raise ValueError(
                    f"{type(part).__name__} steps once per process and by rules of its own: use "
                    "moetrain.integrations.accelerate.accelerate_accumulator, which takes what is inside"
                )
        if not hasattr(optimizer, "param_groups"):
            raise ValueError(f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}")
        own = {id(p) for p in model.parameters()}
        if not owned and any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
            raise ValueError(
                "the optimizer steps parameters that are not the model's: their gradients would be nobody's; make what "
                "they belong to a part of the model, and build the optimizer after casting and wrapping it"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS evaluates the loss within its step, and a window is evaluated once: use another")
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            raise ValueError("ReduceLROnPlateau needs a metric: step it yourself, outside of the accumulator")
        sizes = {len(getattr(loss, name, ())) for name in ("names", "depths", "weights")}
        if sizes == {0} or len(sizes) > 1:
            raise ValueError(
                "loss must have names, depths and weights, one of each for every term, and give their sums: see "
                "moetrain.accumulate.Loss; causal_lm_loss is the plain one"
            )

    @property
    def balance(self) -> Balance:
        """Fixed at construction; ``bias_rate`` of the accumulator may be set between steps."""
        return self._balance

    def __reduce__(self) -> Any:
        raise TypeError("an accumulator is tied to its model: make a new one, and give it this one's state_dict()")

    def step(self, window: Window, *, routing: Sequence[Tensor] | None = None) -> StepReport:
        """One optimizer step on this rank's ``window``; every rank gives as many micro-batches.

        ``routing`` fixes the routers' choices (see ``RoutingLedger.replay``): weights and gradients are the model's
        own.

        Gradients are the step's own: what is in ``.grad`` before is dropped, so a window that an exception ended is as
        if it had not been. Wrappers and stages keep more of it, out of reach: there the next step is refused.

        Raises:
            RuntimeError: an exception ended a window before, in a model under FSDP2, DDP or in stages.
        """
        if self._ended_by is not None:
            raise RuntimeError(
                f"a window ended with {self._ended_by}, and what wraps the model still holds parts of it, so that "
                "steps would be wrong: build model and accumulator again, from the last checkpoint"
            )
        if not isinstance(window, Window):
            raise ValueError("step takes a Window: Window(micro_batches), or windows(loader, micro_batches=...)")
        if not torch.is_grad_enabled():
            raise ValueError("step takes gradients: call it outside torch.no_grad() and torch.inference_mode()")
        parameter = next((p for p in self.model.parameters() if p.requires_grad), None)
        if parameter is None:
            raise ValueError("no parameter of the model requires a gradient: there is nothing to train")
        device = self.device or parameter.device
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        for router in self.ledger.routers if self.bias_rate else ():
            check_bias(router.bias())
        self.traffic.clear()
        window = window.to(device)
        if self.pipeline is not None:
            window = self.pipeline.fill(window)
        depths = max([*self.loss.depths, *(r.depth for r in self.ledger.routers)], default=0)
        counts = count_denominators(window, depths=depths, groups=self.groups, device=device, traffic=self.traffic)
        scale = self._scale(counts, dtype)
        grown = self.owner.divisor * (1.0 if self.loss_scale is None else self.loss_scale.value)
        if grown != 1.0:
            scale = scale * grown
        self.ledger.gradient_scale = grown

        self.ledger.begin(window, counts, dtype, device)
        whole_window = self.balance.active and self.balance.scope == "window"
        in_order = self.pipeline is None or self.pipeline.all_forwards_first
        forwards_first = whole_window and self.window_order == "forwards_first" and in_order
        given = nullcontext() if routing is None else self.ledger.replay(routing)
        with self.ledger.attached(), given, self._whole():
            self.owner.begin(all_forwards_first=forwards_first)
            if self.pipeline is not None:
                sums = self._through_stages(self.pipeline, window, scale, count=whole_window and not forwards_first)
            elif forwards_first:
                sums = self._all_forwards_first(window, scale)
            elif whole_window:
                self._count(window)
                with self.ledger.replay():
                    sums = self._one_by_one(window, scale)
            else:
                sums = self._one_by_one(window, scale)
            self.owner.reduce()

        report, statistics = self._report(window, sums, counts)
        if report.skipped is None:
            self.owner.step()
            self._move_bias(report.load)
            self.ledger.accept(statistics)
            if self.scheduler is not None:
                self.scheduler.step()
        self.owner.discard()
        return report

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Around a window's computation: remembers that an exception ended it, where that cannot be undone."""
        try:
            yield
        except BaseException as error:
            if self.pipeline is not None or not self.owner.forgets:
                self._ended_by = type(error).__name__
            raise

    # -- the two orders -----------------------------------------------------------------------------------------------

    def _one_by_one(self, window: Window, scale: Tensor) -> Tensor:
        """Forward and backward of each micro-batch in turn. Returns the loss sums of this rank, [n_terms]."""
        sums = torch.zeros_like(scale)
        for item in window:
            self.ledger.slot = item.slot
            with self.owner.micro_batch(last=item.slot == len(window) - 1):
                terms = self._terms(item, scale)
                self.ledger.forward_done(item.slot)
                with self.ledger.backward_of(item.slot):
                    self.owner.backward((terms * scale).sum())
            sums += terms.detach()
            if self.owner.measures and not self.groups and item.slot == 0 and len(window) > 1:
                self.owner.measure(*(p.grad for p in self.model.parameters() if p.grad is not None))
        return sums

    def _terms(self, item: MicroBatch, scale: Tensor) -> Tensor:
        with self._held(scale.device):
            terms = self.loss(self.model, item)
        if not isinstance(terms, Tensor) or terms.shape != scale.shape:
            got = list(terms.shape) if isinstance(terms, Tensor) else type(terms).__name__
            raise ValueError(f"the loss must give a sum for each of its {len(scale)} terms, [{len(scale)}], not {got}")
        if not terms.requires_grad:
            raise ValueError("the loss does not depend on any parameter that is trained: nothing would be learnt")
        return terms.to(scale.dtype)

    def _through_stages(self, pipeline: Pipeline, window: Window, scale: Tensor, *, count: bool) -> Tensor:
        """The schedule's order, after a counting pass where it needs one."""
        with self.owner.micro_batch(last=False):
            if not count:
                return pipeline.run(window, scale, self.ledger)
            pipeline.forward(window, self.ledger)
            self.ledger.forwards_done()
            with self.ledger.replay():
                return pipeline.run(window, scale, self.ledger)

    def _count(self, window: Window) -> None:
        """Every forward without gradient: the ledger is complete, and its choices wait to be replayed."""
        # what the model draws at random it draws again
        with torch.no_grad(), torch.random.fork_rng(_generators(next(self.model.parameters()).device)):
            for item in window:
                self.ledger.slot = item.slot
                with self.owner.micro_batch(last=False):
                    self.loss(self.model, item)
        self.ledger.forwards_done()

    def _all_forwards_first(self, window: Window, scale: Tensor) -> Tensor:
        """Every forward before the first backward: the ledger is complete when gradients start."""
        held = []
        for item in window:
            self.ledger.slot = item.slot
            with self.owner.micro_batch(last=False):
                held.append(self._terms(item, scale))
        self.ledger.forwards_done()
        sums = torch.stack([terms.detach() for terms in held]).sum(dim=0)
        for slot in range(len(window)):
            with self.owner.micro_batch(last=slot == len(window) - 1), self.ledger.backward_of(slot):
                terms, held[slot] = held[slot], sums  # drop the graph with its backward
                self.owner.backward((terms * scale).sum())
        return sums

    def _held(self, device: torch.device) -> AbstractContextManager[Any]:
        return nullcontext() if self.host_memory is None else self.host_memory.holding(device)

    # -- the window's end ---------------------------------------------------------------------------------------------

    def _scale(self, counts: Denominators, dtype: torch.dtype) -> Tensor:
        """[n_terms]: weight over denominator; 0 where there is nothing to divide by."""
        valid = counts.valid[list(self.loss.depths)]
        weights = torch.tensor(tuple(self.loss.weights), dtype=torch.float64, device=valid.device)
        return (weights / valid.clamp(min=1)).to(dtype)

    def _report(self, window: Window, sums: Tensor, counts: Denominators) -> tuple[StepReport, Tensor]:
        """Reduces what was counted, clips, and judges; the one place of a step that waits for the device."""
        ledger = self.ledger
        load = ledger.counts.sum(dim=0)
        statistics = ledger.statistics.sum(dim=0)
        parts = [
            sums,
            ledger.balance_values(),
            ledger.z_values.sum(dim=0),
            load,
            statistics,
            self._own_part(window, counts),
        ]
        packed = torch.cat([p.to(torch.float64).flatten() for p in parts])
        stages = () if self.pipeline is None else self.pipeline.stages.groups
        self.traffic.sum(packed, (*self.groups, *stages), "report")
        sums, balance, z, load, statistics, own = (
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

        loss_scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        norm = self.owner.norm() / loss_scale
        norm_value, total_value = torch.stack([norm.to(torch.float64), total]).tolist()
        skipped = self._verdict(norm_value, total_value)
        if skipped is None:
            clip = self.max_norm is not None and norm_value > self.max_norm
            factor = (self.max_norm / (norm_value + 1e-6) if clip and self.max_norm else 1.0) / loss_scale
            if factor != 1.0:
                self.owner.scale(factor)
        if self.loss_scale is not None:
            if skipped is None:
                self.loss_scale.accepted()
            elif not math.isfinite(norm_value):
                self.loss_scale.overflowed()
        report = StepReport(
            losses=losses,
            total=total,
            grad_norm=norm,
            valid_tokens=counts.valid[0],
            routed_tokens=counts.routed[0],
            load=load.to(torch.int64),
            skipped=skipped,
            learning_rate=float(self.optimizer.param_groups[0]["lr"]),
            traffic=self.traffic.by_kind(),
            noise=gradient_noise(own, norm, counts.valid[0]) if own.numel() else None,
            loss_scale=loss_scale,
        )
        return report, statistics.to(torch.int64)

    def _own_part(self, window: Window, counts: Denominators) -> Tensor:
        """``part_statistics`` of this rank's own gradient, or of the first micro-batch's; empty where there is none."""
        square, total = self.owner.own_square, counts.valid[0]
        if square is None:
            return total.new_empty(0)
        if self.loss_scale is not None:
            square = square / self.loss_scale.value**2
        tokens = local_counts(window)[:, 0, 0].to(total.device)
        return part_statistics(square, tokens.sum() if self.groups else tokens[0], total)

    def _verdict(self, norm: float, total: float) -> str | None:
        """The same on every rank, since both numbers are."""
        if not math.isfinite(total):
            return f"the loss is {total}"
        if not math.isfinite(norm):
            return f"the gradient norm is {norm}"
        reason = self.skip_if(norm) if self.skip_if is not None else None
        if reason is True:
            return f"skip_if said so of the gradient norm {norm}"
        return reason or None

    def _move_bias(self, load: Tensor) -> None:
        if not self.bias_rate:
            return
        for router, load_E in zip(self.ledger.routers, load, strict=True):
            bias = router.bias()
            if bias is not None:
                update_bias(bias, load_E, self.bias_rate, zero_centred=self.balance.zero_centred)

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides model, optimizer and scheduler."""
        state: dict[str, Any] = {"routing": self.ledger.routing_state()}
        if self.loss_scale is not None:
            state["loss_scale"] = self.loss_scale.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.ledger.load_routing_state(state["routing"])
        if self.loss_scale is not None and "loss_scale" in state:
            self.loss_scale.load_state_dict(state["loss_scale"])


def _generators(device: torch.device) -> list[int]:
    """CUDA devices whose random state the model draws from."""
    return [device.index or 0] if device.type == "cuda" else []


def _groups(groups: dist.ProcessGroup | Sequence[dist.ProcessGroup] | None) -> tuple[dist.ProcessGroup, ...]:
    if groups is None:
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            return (dist.group.WORLD,)  # type: ignore[return-value]
        return ()
    if isinstance(groups, Sequence):
        return tuple(groups)
    return (groups,)
