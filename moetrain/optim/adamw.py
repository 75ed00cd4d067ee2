"""AdamW with the right parameters under weight decay.

Matrices decay (linear layers, embedding, head, gate, stacked experts); vectors (norms) do not. The routing bias is a
buffer and no optimizer ever sees it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Every trainable parameter in exactly one group: two dimensions or more decay, fewer do not.

    Parameters of different meshes (experts under expert parallelism) are apart: torch steps a group as one.
    """
    groups: dict[tuple[bool, Any], list[nn.Parameter]] = {}
    for p in model.parameters():
        if p.requires_grad:
            groups.setdefault((p.ndim < 2, getattr(p, "device_mesh", None)), []).append(p)
    decaying_first = sorted(groups.items(), key=lambda item: item[0][0])
    return [
        {"params": params, "weight_decay": 0.0 if vector else weight_decay} for (vector, _), params in decaying_first
    ]


def build_adamw(
    model: nn.Module, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> tuple[torch.optim.AdamW, str]:
    """AdamW over the model's parameters, and a line that says which implementation runs.

    torch's fused step does the whole update in one pass over each tensor, on CPU and CUDA and for sharded parameters.
    """
    optimizer = torch.optim.AdamW(parameter_groups(model, weight_decay), lr=lr, betas=betas, eps=eps, fused=True)
    return optimizer, "optimizer: torch AdamW, fused"
