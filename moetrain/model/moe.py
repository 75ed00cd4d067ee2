"""The mixture-of-experts feed-forward: gate, routed experts, shared experts (V3 paper eq 12; facts B.5, C).

Legend: B rows, T tokens, D width, E experts, m expert width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moetrain.config.model import ModelConfig
from moetrain.model import backends
from moetrain.model.dispatch import Dispatcher, LocalDispatcher
from moetrain.model.gate import GATES
from moetrain.model.layers import MLP


class RoutedExperts(nn.Module):
    """Stacked weights: gate_up_proj [E, 2m, D] (gate rows first), down_proj [E, D, m]."""

    in_place_grad: bool = False
    product: backends.Experts

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        e, d, m = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * m, d))
        self.down_proj = nn.Parameter(torch.empty(e, d, m))
        self.product = backends.REFERENCE.experts

    def forward(self, routed: backends.Routed) -> Tensor:
        return self.product(routed, self.gate_up_proj, self.down_proj, in_place_grad=self.in_place_grad)


class MoE(nn.Module):
    """``sum over chosen experts of weight * expert(x), plus the shared experts' one MLP``."""

    dispatcher: Dispatcher

    def __init__(self, config: ModelConfig, depth: int = 0) -> None:
        super().__init__()
        self.gate = GATES[config.topk_method](config, depth)
        self.experts = RoutedExperts(config)
        self.dispatcher = LocalDispatcher(config.n_routed_experts)
        self.shared_experts = (
            MLP(config.hidden_size, config.n_shared_experts * config.moe_intermediate_size)
            if config.n_shared_experts
            else None
        )

    def forward(self, x_BTD: Tensor) -> Tensor:
        x = x_BTD.reshape(-1, x_BTD.shape[-1])
        choice, weight = self.gate(x)
        sent = self.dispatcher.send(x, choice, weight)
        shared = None if self.shared_experts is None else self.shared_experts(x)  # while tokens travel
        y = self.dispatcher.combine(self.experts(self.dispatcher.receive(sent)), sent)
        return (y if shared is None else y + shared).view_as(x_BTD)
