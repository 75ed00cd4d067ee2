"""Who owns the gradients between a backward and the optimizer: the one place where wrappers differ.

The step is the same for a plain module, DistributedDataParallel and FSDP2; what differs is how a gradient gets from
"this rank's sum" to "the sum over all ranks", and when. Every owner sums, none averages, and by default each does it
once per window, in the last backward.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from moetrain.accumulate.norm import grad_norm, local
from moetrain.accumulate.traffic import Traffic

BUCKET = 1 << 25  # bytes reduced in one call


@dataclass(frozen=True)
class Stages:
    """The parameters here are a part of the model's: pipeline stages.

    Attributes:
        groups: process groups over which the model is cut.
        split: weight gradients come later than the gradients of inputs, so weights must stay where they are meanwhile.
        copy: a parameter that another stage holds, too (the embedding, for multi-token prediction).
        copy_groups: its holders, this rank among them; gradients are summed over them.
        counted: whether it is this rank's copy that enters the norm.
    """

    groups: tuple[dist.ProcessGroup, ...]
    split: bool = False
    copy: nn.Parameter | None = None
    copy_groups: tuple[dist.ProcessGroup, ...] = ()
    counted: bool = True


class GradientOwner(Protocol):
    """What the accumulator asks of whoever holds model and optimizer.

    Attributes:
        traffic: counts what is sent; the accumulator gives its own.
        measures: whether ``own_square`` is wanted.
        device: where ranks can reduce, if not where the gradients are.
        divisor: what gradients are divided by on their way to the sum, where that cannot be helped; losses are
            multiplied by it.
        forgets: ``discard`` also drops a window that an exception ended in the middle; wrappers keep parts of it.
        own_square: after ``reduce``: squared norm of this rank's own gradient, from before the reduction; None where
            there was none.
    """

    traffic: Traffic
    measures: bool
    device: torch.device | None
    divisor: float
    forgets: bool
    own_square: Tensor | None

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

    def measure(self, *own: Tensor) -> None:
        """Adds parts of this rank's own gradient to ``own_square``."""
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
    """A module without a wrapper. With process groups, gradients are summed over them when the window ends.

    Parameters in bf16 or fp16 get fp32 gradients for the time of a window, so that small micro-batch gradients are not
    lost in large sums; they are cast once, for the optimizer.
    """

    forgets = True
    divisor = 1.0

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        groups: Sequence[dist.ProcessGroup] = (),
        stages: Stages | None = None,
    ) -> None:
        self.model, self.optimizer, self.groups, self.stages = model, optimizer, tuple(groups), stages
        self.traffic, self.measures = Traffic(), False
        self.device: torch.device | None = None
        self.own_square: Tensor | None = None
        self.half: list[nn.Parameter] = []

    def begin(self, *, all_forwards_first: bool) -> None:
        self.discard()
        self.own_square = None
        # looked up in each window: a model may be cast and layers unfrozen between two
        self.half = self._half_precision()
        for p in self.half:
            p.grad_dtype = torch.float32

    def _half_precision(self) -> list[nn.Parameter]:
        halves = (torch.bfloat16, torch.float16)
        return [p for p in self.model.parameters() if p.dtype in halves and p.requires_grad]

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def reduce(self) -> None:
        if self.groups:
            self._sum_over_ranks()
        self._sum_copies()

    def _sum_copies(self) -> None:
        copy = None if self.stages is None else self.stages.copy
        if self.stages is not None and copy is not None and copy.grad is not None:
            own = local(copy.grad)
            there = own if self.device is None else own.to(self.device)
            self.traffic.sum(there, self.stages.copy_groups, "gradients")
            if there is not own:  # gradients wait on the host
                own.copy_(there)

    def _sum_over_ranks(self) -> None:
        grads = _every_gradient(self.model)
        if self.measures:
            self.measure(*grads)
        for bucket in _buckets(grads):
            flat = bucket[0] if len(bucket) == 1 else torch.cat([g.flatten() for g in bucket])
            self.traffic.sum(flat, self.groups, "gradients")
            if len(bucket) > 1:
                parts = flat.split([g.numel() for g in bucket])
                torch._foreach_copy_(bucket, [part.view_as(g) for part, g in zip(parts, bucket, strict=True)])

    @torch.no_grad()
    def measure(self, *own: Tensor) -> None:
        for x in own:
            square = torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32)).double().square()
            self.own_square = square if self.own_square is None else self.own_square + square

    def norm(self) -> Tensor:
        if self.stages is None:
            return grad_norm(self.model.parameters(), traffic=self.traffic, device=self.device)
        elsewhere = None if self.stages.counted else self.stages.copy
        parameters = (p for p in self.model.parameters() if p is not elsewhere)
        return grad_norm(parameters, extra_groups=self.stages.groups, traffic=self.traffic, device=self.device)

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        grads = [local(p.grad) for p in self.model.parameters() if p.grad is not None]
        if grads:
            torch._foreach_mul_(grads, factor)

    def step(self) -> None:
        for p in self.half:
            grad, p.grad = p.grad, None
            p.grad_dtype = p.dtype
            p.grad = None if grad is None else grad.to(p.dtype)
        self.optimizer.step()

    def discard(self) -> None:
        # the model's, not the optimizer's: one that steps a part of the parameters would leave the others' to grow
        for p in self.model.parameters():
            p.grad = None
        for p in self.half:
            p.grad_dtype = p.dtype


def _every_gradient(model: nn.Module) -> list[Tensor]:
    """Gradients of all trained parameters, zeros where this rank had none: every rank sums the same."""
    grads = []
    for p in model.parameters():
        if p.requires_grad:
            if p.grad is None:
                p.grad = torch.zeros_like(p, dtype=getattr(p, "grad_dtype", None) or p.dtype)
            grads.append(p.grad)
    return grads


def _buckets(grads: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, up to ``BUCKET`` bytes together."""
    bucket: list[Tensor] = []
    size = 0
    for g in grads:
        more = g.numel() * g.element_size()
        if bucket and (size + more > BUCKET or g.dtype != bucket[0].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(g)
        size += more
    if bucket:
        yield bucket


class DDPOwner(PlainOwner):
    """DistributedDataParallel: its buckets are summed (not averaged), in the last backward only.

    Its reducer is armed by a forward and fired by the next backward, so with all forwards first it cannot tell the last
    backward from the first: then its gradients are summed here after the last backward, without overlap. So are the
        fp32 gradients of parameters in bf16, which its buckets cannot hold.
    """

    forgets = False

    def __init__(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(model, optimizer, (model.process_group,))
        self.ddp, self.silent = model, False
        model.register_comm_hook(self, _sum_bucket)

    def begin(self, *, all_forwards_first: bool) -> None:
        super().begin(all_forwards_first=all_forwards_first)
        self.silent = all_forwards_first or bool(self.half)

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        if last and not self.silent:
            return nullcontext()
        silent: AbstractContextManager[Any] = self.ddp.no_sync()
        return silent

    def reduce(self) -> None:
        if self.silent:
            super().reduce()


def _sum_bucket(owner: DDPOwner, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    if owner.measures:
        owner.measure(bucket.buffer())
    owner.traffic.count("gradients", bucket.buffer())
    work = dist.all_reduce(bucket.buffer(), group=owner.ddp.process_group, async_op=True)
    return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]


# DistributedDataParallel looks at the annotations themselves, not at their text
_sum_bucket.__annotations__ |= {"bucket": GradBucket, "return": torch.futures.Future[Tensor]}


class FSDPOwner(PlainOwner):
    """FSDP2 (``fully_shard``): unsharded gradients are kept until the last backward, which reduces and shards them.

    ``every_micro_batch`` reduces in each backward instead: less memory, K times the traffic. Weights that stay gathered
    after a forward (the root's, and all with ``reshard_after_forward=False``) stay for the window: the next forward
    would gather the same ones, before the memory is used for anything else.
    """

    forgets = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every_micro_batch: bool = False,
        stages: Stages | None = None,
    ) -> None:
        super().__init__(model, optimizer, stages=stages)
        self.every = every_micro_batch
        self.keeping: list[Any] = []
        gather, scatter = _CountedAllGather(self), _CountedReduceScatter(self)
        for module in model.modules():
            if is_fsdp(module):
                fsdp: Any = module
                fsdp.set_gradient_divide_factor(1.0)
                fsdp.set_force_sum_reduction_for_comms(True)
                fsdp.set_custom_all_gather(gather)
                fsdp.set_custom_reduce_scatter(scatter)
                if (stages is not None and stages.split) or stays_gathered(module, model):
                    self.keeping.append(module)
                if _has_copies(module):  # HSDP sums shards over the copies, too
                    fsdp.set_all_reduce_hook(lambda reduced: self.traffic.count("gradients", reduced))

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        fsdp: Any = self.model
        fsdp.set_requires_gradient_sync(last or self.every)
        fsdp.set_is_last_backward(last)
        for module in self.keeping:
            module.set_reshard_after_backward(last, recurse=False)
        return nullcontext()

    def reduce(self) -> None:
        if self.stages is not None:
            self._end_backwards()
        # every parameter has a gradient in every step, or its optimizer state would fall behind on this rank
        _every_gradient(self.model)
        self._sum_copies()

    def _half_precision(self) -> list[nn.Parameter]:
        return []  # a policy with reduce_dtype=torch.float32 does it

    def _end_backwards(self) -> None:
        """Reduces what all backwards left, as torch's own pipeline runtime does: none of them was the last of all."""
        fsdp: Any = self.model
        fsdp.set_requires_gradient_sync(True)
        fsdp.set_is_last_backward(True)
        fsdp.set_reshard_after_backward(True)
        settle_gradients(fsdp)
        fsdp._get_fsdp_state()._root_post_backward_final_callback()


def stays_gathered(module: nn.Module, root: nn.Module) -> bool:
    """FSDP2: whether a forward leaves the module's weights gathered; of the root it always does, unless told."""
    state = module._get_fsdp_state()  # type: ignore[operator]
    if module is root and state._auto_reshard_after_forward:
        return True
    return all(group.post_forward_mesh_info is None for group in state._fsdp_param_groups)


def settle_gradients(model: nn.Module) -> None:
    """FSDP2: moves gradients that hang on unsharded weights to where they are accumulated, or reduces them."""
    root: Any = model
    for state in root._get_fsdp_state()._state_ctx.all_states:
        for group in state._fsdp_param_groups:
            group.post_backward()


class _Allocates:
    """The part of FSDP2's collectives that we leave as it is."""

    def __init__(self, owner: FSDPOwner) -> None:
        self.owner = owner

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _CountedAllGather(_Allocates):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        self.owner.traffic.count("parameters", output_tensor)
        work: dist.Work | None = _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)
        return work


class _CountedReduceScatter(_Allocates):
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any = dist.ReduceOp.SUM,
        async_op: bool = False,
    ) -> dist.Work | None:
        if self.owner.measures:
            self.owner.measure(input_tensor)
        self.owner.traffic.count("gradients", input_tensor)
        work: dist.Work | None = _reduce_scatter(output_tensor, input_tensor, op=op, group=group, async_op=async_op)
        return work


# their names since torch 2.13, where the older ones warn
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _has_copies(module: nn.Module) -> bool:
    placements = (getattr(p, "placements", ()) for p in module.parameters())
    return any(placement.is_replicate() for of in placements for placement in of)


def is_fsdp(module: nn.Module) -> bool:
    return hasattr(module, "set_requires_gradient_sync")


def owner_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[dist.ProcessGroup],
    *,
    every_micro_batch: bool = False,
    stages: Stages | None = None,
) -> GradientOwner:
    """The owner that fits the model's wrapper.

    Raises:
        ValueError: the wrapper sums gradients over other ranks than tokens are split over, or in half precision.
    """
    if is_fsdp(model):
        _same_ranks(groups, _sharding_groups(model), "fully_shard", "mesh")
        _full_precision(model)
        return FSDPOwner(model, optimizer, every_micro_batch=every_micro_batch, stages=stages)
    if every_micro_batch:
        raise ValueError(
            "reduce='micro_batch' needs FSDP2: elsewhere gradients are whole anyway, and it would save nothing"
        )
    if isinstance(model, DistributedDataParallel):
        _same_ranks(groups, [model.process_group], "DistributedDataParallel", "process group")
        return DDPOwner(model, optimizer)
    return PlainOwner(model, optimizer, groups, stages)


def _same_ranks(
    tokens: Sequence[dist.ProcessGroup], gradients: Sequence[dist.ProcessGroup], wrapper: str, what: str
) -> None:
    """Groups of one list are axes: together they span the product of their sizes."""
    ranks, summed = (math.prod(group.size() for group in groups) for groups in (tokens, gradients))
    if ranks != summed:
        raise ValueError(
            f"{wrapper} sums gradients over {summed} ranks, and groups say that tokens are split over {ranks}: give "
            f"groups=(its {what}), or wrap the model over all of them"
        )


def _sharding_groups(model: nn.Module) -> list[dist.ProcessGroup]:
    """Of the largest mesh, the root's; experts may lie on a part of it."""
    meshes: list[Any] = [p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")]
    return list(max(meshes, key=lambda mesh: mesh.size()).get_all_groups()) if meshes else []


def _full_precision(model: nn.Module) -> None:
    for module in model.modules():
        if not is_fsdp(module):
            continue
        fsdp: Any = module
        policy = fsdp._get_fsdp_state()._mp_policy
        half = any(p.dtype in (torch.bfloat16, torch.float16) for p in module.parameters())
        if half and policy.reduce_dtype in (None, torch.bfloat16, torch.float16):
            raise ValueError(
                "parameters in half precision under fully_shard would sum their gradients in it: give "
                "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)"
            )
