"""What a window keeps between its forwards and its backwards, moved to host memory.

With all forwards first and blocks recomputed, K micro-batches' block inputs wait for their backward. Host memory is
where they can wait; parameters that autograd saves beside them stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

SMALLEST = 1 << 12  # bytes: below that a copy costs more than it frees


class HostMemory:
    """Saves activations on the host inside its context, and brings each back when its backward asks.

    On a GPU the copies go to pinned memory, in the stream that computes. On a CPU there is nothing to move.

    Attributes:
        moved: bytes sent to the host so far.
    """

    def __init__(self) -> None:
        self.moved = 0

    def holding(self, device: torch.device) -> AbstractContextManager[Any]:
        """The context for a forward on ``device``."""
        return nullcontext() if device.type == "cpu" else self.hooks()

    def hooks(self) -> AbstractContextManager[Any]:
        """The same whatever the device."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, lambda bring: bring())

    def _pack(self, x: Tensor) -> Callable[[], Tensor]:
        size = x.numel() * x.element_size()
        if size < SMALLEST or isinstance(x, nn.Parameter) or isinstance(x._base, nn.Parameter):
            return lambda: x
        host = torch.empty(x.size(), dtype=x.dtype, pin_memory=x.is_cuda)
        host.copy_(x, non_blocking=x.is_cuda)
        self.moved += size
        device = x.device
        return lambda: host.to(device, non_blocking=True)
