"""Counting first: what every loss term of a step is divided by, over the whole window and all data ranks.

A mean per micro-batch, averaged afterwards, weighs tokens of short micro-batches too much; a mean per rank does the
same across ranks. So sums are divided by these counts and never by anything local. They cost one small all-reduce,
started before the first forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moetrain.accumulate.traffic import Traffic
from moetrain.accumulate.window import IGNORED, Window


class Denominators(NamedTuple):
    """Global counts, float64 [1 + depths] each: main model, then MTP depth 1, 2, ...

    valid: targets of the head; routed: tokens counted in expert statistics; sequences: rows with a routed token.
    """

    valid: Tensor
    routed: Tensor
    sequences: Tensor


def count_denominators(
    window: Window,
    *,
    depths: int = 0,
    groups: Sequence[dist.ProcessGroup] = (),
    device: torch.device | None = None,
    traffic: Traffic | None = None,
) -> Denominators:
    """Counts of the global batch.

    Args:
        window: this rank's micro-batches.
        depths: MTP depths to count besides the main model.
        groups: process groups over which tokens are split; summed over each.
        device: where the counts are needed (default: the window's).
        traffic: counts the reduction.
    """
    counts = local_counts(window, depths).sum(dim=0)  # exact up to 2^53
    if device is not None:
        counts = counts.to(device, non_blocking=True)
    (traffic or Traffic()).sum(counts, groups, "counts")
    return Denominators(*counts.unbind(dim=1))


def local_counts(window: Window, depths: int = 0) -> Tensor:
    """float64 [K, 1 + depths, 3]: valid, routed and sequences of each micro-batch of this rank."""
    rows = []
    for item in window:
        B, T = item.input_ids.shape
        per_depth = []
        for depth in range(1 + depths):
            valid = (item.targets(depth + 1) != IGNORED).sum()
            mask = item.routed(depth)
            if mask is None:
                per_depth.append(torch.stack([valid, valid.new_tensor(B * T), valid.new_tensor(B)]))
            else:
                per_depth.append(torch.stack([valid, mask.sum(), mask.any(dim=1).sum()]))
        rows.append(torch.stack(per_depth))
    return torch.stack(rows).to(torch.float64)
