"""Bringing tokens to experts and results back, behind three verbs, so that the layer never knows how far they travel.

``send`` lets tokens leave for the devices of their experts, ``receive`` waits for the rows that this device's experts
work on, ``combine`` brings the rows' sums back to their tokens. What the layer computes between the first two hides the
journey. On one device all are local: no row moves at all, the experts gather by index and sum by index.

Legend: T tokens, D width, K experts per token, N = T * K entries, E experts.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from moetrain.model.backends import Routed


class Dispatcher(Protocol):
    """``send(x_TD, choice_TK, weight_TK) -> sent``, ``receive(sent) -> routed``, ``combine(y_RD, sent) -> y_TD``."""

    def send(self, x_TD: Tensor, choice_TK: Tensor, weight_TK: Tensor) -> Any: ...

    def receive(self, sent: Any) -> Routed: ...

    def combine(self, y_RD: Tensor, sent: Any) -> Tensor: ...


class LocalDispatcher:
    """All experts are here: rows are the tokens themselves."""

    def __init__(self, experts: int) -> None:
        self.experts = experts

    def send(self, x_TD: Tensor, choice_TK: Tensor, weight_TK: Tensor) -> Routed:
        k = choice_TK.shape[1]
        expert_N = choice_TK.flatten()
        order_N = expert_N.argsort(stable=True)
        place_N = torch.arange(order_N.shape[0], device=order_N.device)
        position_N = torch.empty_like(order_N).scatter_(0, order_N, place_N)
        counts_E = torch.zeros(self.experts, dtype=torch.int64, device=order_N.device)
        counts_E.scatter_add_(0, expert_N, torch.ones_like(expert_N))
        return Routed(
            x_RD=x_TD,
            weight_N=weight_TK.flatten().index_select(0, order_N),
            row_N=order_N // k,
            position_N=position_N,
            offset_R=place_N[::k].contiguous(),
            counts_E=counts_E,
        )

    def receive(self, sent: Routed) -> Routed:
        return sent

    def combine(self, y_RD: Tensor, sent: Routed) -> Tensor:
        return y_RD
