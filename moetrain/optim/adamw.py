"""AdamW with the right parameters under weight decay.

Matrices decay (linear layers, embedding, head, gate, stacked experts); vectors (norms) do not. The routing bias is a
buffer and no optimizer ever sees it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups, every trainable parameter in exactly one: two dimensions or more decay, fewer do not."""
    decay: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for p in model.parameters():
        if p.requires_grad:
            (decay if p.ndim >= 2 else rest).append(p)
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def build_adamw(
    model: nn.Module, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> tuple[torch.optim.AdamW, str]:
    """AdamW over the model's parameters, and a line that says which implementation runs.

    torch's fused step does the whole update in one pass over each tensor, on CPU and CUDA and for sharded parameters.
    """
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay), lr=lr, betas=betas, eps=eps, fused=True)
    return optimizer, "optimizer: torch AdamW, fused"
