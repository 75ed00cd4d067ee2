"""The accumulation core inside an Accelerate loop: what ``Accelerator.prepare`` gave, unwrapped where it would count
twice.

Accelerate scales losses, skips optimizer steps and steps schedulers once per process. A window is a whole step, so the
optimizer and the scheduler that belong to it are the ones inside Accelerate's wrappers; model and loader stay wrapped.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType
from torch import nn

from moetrain.accumulate import LossScale, MoEAccumulator

KNOWN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.FSDP)


def accelerate_accumulator(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | AcceleratedOptimizer,
    *,
    scheduler: Any = None,
    **kwargs: Any,
) -> MoEAccumulator:
    """``MoEAccumulator`` over prepared (or plain) parts; keywords are its own.

    ``scheduler`` is stepped once per accepted window, on any number of processes. With ``mixed_precision="fp16"`` the
    loss is scaled by ``LossScale`` in place of Accelerate's scaler. No ``accumulate()``, ``backward()`` or
    ``clip_grad_norm_()`` of the accelerator is needed. A prepared loader repeats samples to make the last
    batches even, and the last step is then not the one of one process: give the accelerator
    ``dataloader_config=DataLoaderConfiguration(even_batches=False)``, and ``windows`` the ``group``.

    Raises:
        ValueError: the accelerator accumulates by itself, or runs on something that is not supported here.
    """
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps={accelerator.gradient_accumulation_steps} would divide losses once more: "
            "leave it at 1, a window is the accumulation"
        )
    if accelerator.distributed_type not in KNOWN:
        raise ValueError(f"{accelerator.distributed_type} is not supported: use DDP, FSDP2 or one process")
    if isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    if isinstance(scheduler, AcceleratedScheduler):
        scheduler = scheduler.scheduler
    if accelerator.mixed_precision == "fp16":
        kwargs.setdefault("loss_scale", LossScale())
    return MoEAccumulator(model, optimizer, scheduler=scheduler, **kwargs)
