"""Who owns gradients under ZeRO: what stays ours of a step (the window's end, one norm, the verdict, the factor) over
what DeepSpeed keeps of them, which differs between stages 1 and 2 (flat partitions) and 3 (a part of each parameter).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from moetrain.accumulate.traffic import Traffic
from moetrain.config.run import DeepSpeedConfig
from moetrain.parallel.ranks import Ranks
from moetrain.precision import Fp8


class ZeroOwner:
    """See ``moetrain.accumulate.owners.GradientOwner``; ``wrapped`` and ``sharded`` are DeepSpeed's engine and
    optimizer."""

    forgets = False

    def __init__(self, wrapped: Any, sharded: Any, ranks: Ranks, config: DeepSpeedConfig, fp8: Fp8 | None) -> None:
        self.wrapped, self.sharded, self.ranks, self.fp8 = wrapped, sharded, ranks, fp8
        self.gradients: _Gradients = (_Whole if config.zero_stage < 3 else _Parts)(wrapped, sharded)
        self.traffic, self.measures = Traffic(), False
        self.device: torch.device | None = None
        self.own_square: Tensor | None = None
        self.divisor = float(ranks.data_world)  # DeepSpeed averages, also what experts' own groups sum
        self.factor = 1.0

    def begin(self, *, all_forwards_first: bool) -> None:
        self.factor = 1.0
        self.discard()  # what an exception left between a window's last backward and its verdict

    def micro_batch(self, *, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.wrapped.backward(loss, scale_wrt_gas=False)

    def reduce(self) -> None:
        self.gradients.finish()

    def measure(self, *own: Tensor) -> None:
        raise ValueError("measure_noise needs a gradient of each rank's own, which ZeRO does not keep")

    @torch.no_grad()
    def norm(self) -> Tensor:
        squares = self.gradients.squares().to(self.ranks.device)
        return self.traffic.sum(squares, self.ranks.groups, "norm").sqrt()

    def scale(self, factor: float) -> None:
        self.factor *= factor

    def step(self) -> None:
        self.sharded.override_loss_scale(1.0 / self.factor)  # what it divides gradients by as it steps
        self.sharded.step()
        self.sharded.override_loss_scale(1.0)
        if self.fp8 is not None:
            self.fp8.drop()

    def discard(self) -> None:
        self.gradients.forget()
        self.sharded.zero_grad()


class _Gradients(Protocol):
    """This rank's part of the reduced gradients, wherever they lie."""

    def __init__(self, wrapped: Any, sharded: Any) -> None: ...

    def finish(self) -> None:
        """After the last backward: what is to be stepped is complete, and where the optimizer looks for it."""
        ...

    def squares(self) -> Tensor:
        """Sum of their squares, at least fp32, shape []."""
        ...

    def forget(self) -> None: ...


class _Whole:
    """ZeRO 1 and 2: flat partitions of groups of parameters."""

    def __init__(self, wrapped: Any, sharded: Any) -> None:
        self.wrapped, self.sharded = wrapped, sharded

    def finish(self) -> None:
        if self.sharded.partition_gradients:
            self.sharded.finalize_gradient_accumulation_boundary()
            return
        self.wrapped._running_engine_step = True  # its word for "the window ends here"
        try:
            self.wrapped.allreduce_gradients()
        finally:
            self.wrapped._running_engine_step = False

    def squares(self) -> Tensor:
        zero = self.sharded
        if zero.cpu_offload:
            return _squares([p.grad for p in zero.single_partition_of_fp32_groups])
        return _squares([g for group in zero.averaged_gradients.values() for g in group or ()])

    def forget(self) -> None:
        zero = self.sharded
        zero.micro_step_id = -1
        if zero.cpu_offload:
            zero._wait_for_offload_copies()
            zero._offload_accumulated_param_ids = set()
            zero.reset_cpu_buffers()
        zero._release_preflattened_grad_buffers()
        for group in zero.averaged_gradients:
            zero.averaged_gradients[group] = None
        zero.all_grad_tensors.clear()


class _Parts:
    """ZeRO 3: a part of each parameter."""

    def __init__(self, wrapped: Any, sharded: Any) -> None:
        self.sharded = sharded

    def finish(self) -> None:
        self.sharded.finalize_gradient_accumulation_boundary()

    def squares(self) -> Tensor:
        zero = self.sharded
        if zero.offload_optimizer:  # they may be on a drive; their norms are known since they went there
            norms = list(zero.norm_for_param_grads.values())
            return torch.stack([n.double() for n in norms]).square().sum() if norms else torch.zeros(())
        return _squares([g for group in zero.averaged_gradients.values() for g in group or ()])

    def forget(self) -> None:
        zero = self.sharded
        zero._pre_step()
        zero.averaged_gradients = {}
        if zero.offload_optimizer:
            zero.reset_cpu_buffers()


def _squares(grads: Sequence[Tensor]) -> Tensor:
    if not grads:
        return torch.zeros(())
    norms = torch._foreach_norm([g.detach() for g in grads], 2, dtype=torch.float32)
    return torch.stack(norms).double().square().sum()
