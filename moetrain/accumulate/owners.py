"""Who owns the gradients between a backward and the optimizer: the one place where wrappers differ.

The step is the same for a plain module, DistributedDataParallel and FSDP2; what differs is how a gradient gets from
"this rank's sum" to "the sum over all ranks", and when. Every owner sums, none averages, and by default each does it
once per window, in the last backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from moetrain.accumulate.norm import grad_norm, local


class GradientOwner(Protocol):
    """What the accumulator asks of whoever holds model and optimizer."""

    def begin(self, *, all_forwards_first: bool) -> None:
        """Before a window: forgets gradients that are not its own, and learns in which order it will run.

        ``all_forwards_first``: every forward comes before the first backward.
        """
        ...

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        """Entered around a micro-batch's forward and backward (or each apart); ``last`` ends the window."""
        ...

    def backward(self, loss: Tensor) -> None: ...

    def reduce(self) -> None:
        """After the last backward: gradients are sums over all ranks when this returns."""
        ...

    def norm(self) -> Tensor:
        """Norm of the reduced gradients, the same number on every rank."""
        ...

    def scale(self, factor: float) -> None:
        """Multiplies all gradients."""
        ...

    def step(self) -> None: ...

    def discard(self) -> None:
        """Forgets the window's gradients."""
        ...


class PlainOwner:
    """A module without a wrapper. With process groups, gradients are summed over them when the window ends."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, groups: Sequence[dist.ProcessGroup] = ()
    ) -> None:
        self.model, self.optimizer, self.groups = model, optimizer, tuple(groups)

    def begin(self, *, all_forwards_first: bool) -> None:
        self.discard()

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def reduce(self) -> None:
        for p in self.model.parameters():
            if p.requires_grad and self.groups:
                if p.grad is None:
                    p.grad = torch.zeros_like(p)
                for group in self.groups:
                    dist.all_reduce(p.grad, group=group)

    def norm(self) -> Tensor:
        return grad_norm(self.model.parameters())

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        grads = [local(p.grad) for p in self.model.parameters() if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)

    def step(self) -> None:
        self.optimizer.step()

    def discard(self) -> None:
        # the model's, not the optimizer's: one that steps a part of the parameters would leave the others' to grow
        for p in self.model.parameters():
            p.grad = None


class DDPOwner(PlainOwner):
    """DistributedDataParallel: its buckets are summed (not averaged), in the last backward only.

    Its reducer is armed by a forward and fired by the next backward, so with all forwards first it cannot tell the last
    backward from the first: then its gradients are summed here after the last backward, without overlap.
    """

    def __init__(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer, (model.process_group,))
        self.ddp, self.silent = model, False
        model.register_comm_hook(model.process_group, _sum_bucket)

    def begin(self, *, all_forwards_first: bool) -> None:
        super().begin(all_forwards_first=all_forwards_first)
        self.silent = all_forwards_first

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        if last and not self.silent:
            return nullcontext()
        silent: AbstractContextManager[Any] = self.ddp.no_sync()
        return silent

    def reduce(self) -> None:
        if self.silent:
            super().reduce()


def _sum_bucket(group: dist.ProcessGroup, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]


# DistributedDataParallel looks at the annotations themselves, not at their text
_sum_bucket.__annotations__ |= {"bucket": GradBucket, "return": torch.futures.Future[Tensor]}


class FSDPOwner(PlainOwner):
    """FSDP2 (``fully_shard``): unsharded gradients are kept until the last backward, which reduces and shards them.

    ``every_micro_batch`` reduces in each backward instead: less memory, K times the traffic.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, every_micro_batch: bool = False) -> None:
        super().__init__(model, optimizer)
        self.every = every_micro_batch
        for module in model.modules():
            if is_fsdp(module):
                module.set_gradient_divide_factor(1.0)  # type: ignore[operator]
                module.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        fsdp: Any = self.model
        fsdp.set_requires_gradient_sync(last or self.every)
        fsdp.set_is_last_backward(last)
        return nullcontext()

    def reduce(self) -> None:
        # every parameter has a gradient in every step, or its optimizer state would fall behind on this rank
        for p in self.model.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)


def is_fsdp(module: nn.Module) -> bool:
    return hasattr(module, "set_requires_gradient_sync")


def owner_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[dist.ProcessGroup],
    *,
    every_micro_batch: bool = False,
) -> GradientOwner:
    """The owner that fits the model's wrapper."""
    if is_fsdp(model):
        return FSDPOwner(model, optimizer, every_micro_batch=every_micro_batch)
    if every_micro_batch:
        raise ValueError(
            "reduce='micro_batch' needs FSDP2: elsewhere gradients are whole anyway, and it would save nothing"
        )
    if isinstance(model, DistributedDataParallel):
        return DDPOwner(model, optimizer)
    return PlainOwner(model, optimizer, groups)
