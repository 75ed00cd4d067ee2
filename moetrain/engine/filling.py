"""Fills a model that is spread already: every rank asks the source for the rows it holds, and for nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from moetrain.model import Weights


class Own(NamedTuple):
    """``rows`` [n, ...] of this rank are rows ``first`` to ``first + n`` of a tensor of ``shape``; memory is shared."""

    shape: torch.Size
    first: int
    rows: Tensor


@torch.no_grad()
def own_rows(tensor: Tensor) -> Own:
    """Of a parameter as ``parallel.plan.spread`` leaves it: sharded over its first dimension, however often, or whole.

    Experts are cut twice, over the expert group and within each of its parts; the placements say in which order.
    """
    if not isinstance(tensor, DTensor):
        return Own(tensor.shape, 0, tensor.detach())
    rows = tensor.to_local()
    size, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    if tuple(rows.shape) != tuple(size) or any(offset[1:]):
        raise RuntimeError(f"{tensor.placements} leave {list(rows.shape)} of {list(tensor.shape)}, which are no rows")
    return Own(tensor.shape, offset[0], rows)


def fill(model: nn.Module, weights: Weights, *, shapes: Mapping[str, torch.Size] | None = None, part: int = 0) -> None:
    """Sets every parameter and buffer that this rank has of ``model``, which has memory for them.

    ``shapes``: of whole parameters, where plain tensors are a part of them: part number ``part``, of equal ones.
    """
    for name, tensor in _named(model):
        own = own_rows(tensor)
        if shapes is not None and shapes.get(name, own.shape) != own.shape:
            own = Own(shapes[name], part * len(own.rows), own.rows)
        weights.fill(name, own.shape, own.first, own.rows)


def _named(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
