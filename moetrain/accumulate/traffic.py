"""What a step sends: collectives and bytes by kind, counted where they are made.

Peers state "one reduction per window" and reduce in every micro-batch under some wrapper (pitfalls G2). Here every call
of a step goes through a counter, so a report says what was sent and a test holds it against the arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch.distributed as dist
from torch import Tensor

#: gradients: sums of gradients; parameters: gathers of sharded ones; counts: denominators; balance: routing statistics
#: that a scope needs inside the window; norm; report: loss terms and loads at the window's end; experts: tokens on
#: their way to experts and back; stages: hidden states and their gradients between pipeline ranks
Kind = Literal["gradients", "parameters", "counts", "balance", "norm", "report", "experts", "stages"]


class Calls(NamedTuple):
    """Collectives of one kind: how many, and the bytes of the whole tensors they were called on.

    The whole tensor is what is reduced, the input of a reduce-scatter, the output of an all-gather, and what is handed
    to an all-to-all (the part that stays here included).
    """

    calls: int = 0
    bytes: int = 0


class Traffic:
    """A counter of one step; it knows nothing of who calls."""

    def __init__(self) -> None:
        self._kinds: dict[str, Calls] = {}

    def clear(self) -> None:
        self._kinds = {}

    def count(self, kind: Kind, whole: Tensor) -> None:
        before = self._kinds.get(kind, Calls())
        self._kinds[kind] = Calls(before.calls + 1, before.bytes + whole.numel() * whole.element_size())

    def sum(self, x: Tensor, groups: Sequence[dist.ProcessGroup], kind: Kind) -> Tensor:
        """Sums ``x`` in place over each group."""
        for group in groups:
            self.count(kind, x)
            dist.all_reduce(x, op=dist.ReduceOp.SUM, group=group)
        return x

    def by_kind(self) -> Mapping[str, Calls]:
        return dict(self._kinds)
