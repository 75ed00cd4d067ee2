"""One gradient norm for all layouts: every element once, whatever mesh its parameter lies on.

``torch.nn.utils.clip_grad_norm_`` fails over parameters of different meshes, and a norm per group makes replicas
diverge. Here local shards are summed in fp32 at least, then over exactly the mesh dimensions that split them.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from moetrain.accumulate.traffic import Traffic


def local(x: Tensor) -> Tensor:
    """This rank's part of a DTensor, or the tensor itself."""
    to_local = getattr(x, "to_local", None)
    out: Tensor = x if to_local is None else to_local()
    return out


def _splitting_groups(x: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Process groups whose ranks hold different parts of ``x``."""
    placements = getattr(x, "placements", None)
    if placements is None:
        return ()
    mesh = x.device_mesh  # type: ignore[attr-defined]
    return tuple(mesh.get_group(i) for i, p in enumerate(placements) if not p.is_replicate())


@torch.no_grad()
def grad_norm(
    parameters: Iterable[Tensor],
    *,
    extra_groups: Sequence[dist.ProcessGroup] = (),
    traffic: Traffic | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """The 2-norm of all gradients, the same number on every rank; at least fp32, shape [].

    Args:
        parameters: parameters with reduced gradients (missing ones count as zero).
        extra_groups: groups over which the *parameters* themselves are spread (pipeline stages).
        traffic: counts the reductions.
        device: where ranks can reduce, for gradients that wait elsewhere; default: the parameters'.
    """
    traffic = traffic or Traffic()
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = defaultdict(list)
    parameters = list(parameters)
    device = device or next((p.device for p in parameters), torch.device("cpu"))
    for p in parameters:
        if p.grad is not None:
            by_groups[_splitting_groups(p.grad)].append(local(p.grad))
    total = torch.zeros((), dtype=torch.float32, device=device)
    for groups, grads in by_groups.items():
        stat = functools.reduce(torch.promote_types, (g.dtype for g in grads), torch.float32)
        norms = torch._foreach_norm(grads, 2, dtype=stat)
        square = torch.stack([n.to(stat) for n in norms]).square().sum()
        total = total + traffic.sum(square.to(device), groups, "norm")
    return traffic.sum(total, extra_groups, "norm").sqrt()
