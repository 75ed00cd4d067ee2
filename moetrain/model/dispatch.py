"""Bringing tokens to experts and results back, behind two verbs, so that the layer never knows how far they travel.

``dispatch`` turns a routing into the rows that this device's experts work on, ``combine`` brings the rows' sums back to
their tokens. On one device both are local: no row moves at all, the experts gather by index and sum by index.

Legend: T tokens, D width, K experts per token, N = T * K entries, E experts.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from moetrain.model.backends import Routed


class Dispatcher(Protocol):
    """``dispatch(x_TD, choice_TK, weight_TK) -> (routed, handle)``, ``combine(y_RD, handle) -> y_TD``."""

    def dispatch(self, x_TD: Tensor, choice_TK: Tensor, weight_TK: Tensor) -> tuple[Routed, Any]: ...

    def combine(self, y_RD: Tensor, handle: Any) -> Tensor: ...


class LocalDispatcher:
    """All experts are here: rows are the tokens themselves."""

    def __init__(self, experts: int) -> None:
        self.experts = experts

    def dispatch(self, x_TD: Tensor, choice_TK: Tensor, weight_TK: Tensor) -> tuple[Routed, None]:
        k = choice_TK.shape[1]
        expert_N = choice_TK.flatten()
        order_N = expert_N.argsort(stable=True)
        place_N = torch.arange(order_N.shape[0], device=order_N.device)
        position_N = torch.empty_like(order_N).scatter_(0, order_N, place_N)
        counts_E = torch.zeros(self.experts, dtype=torch.int64, device=order_N.device)
        counts_E.scatter_add_(0, expert_N, torch.ones_like(expert_N))
        routed = Routed(
            x_RD=x_TD,
            weight_N=weight_TK.flatten().index_select(0, order_N),
            row_N=order_N // k,
            position_N=position_N,
            offset_R=place_N[::k].contiguous(),
            counts_E=counts_E,
        )
        return routed, None

    def combine(self, y_RD: Tensor, handle: None) -> Tensor:
        return y_RD
