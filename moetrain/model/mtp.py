"""Multi-token prediction (V3 paper 2.2): module k predicts token t + k + 1 from the state before it and token t + k.

Choices that the paper leaves open, as the released weights have them (facts B.6): the projection takes
[embedding; hidden] in this order; the state handed in is the one *after* the final norm; module k + 1 gets module k's
state after its own norm likewise; positions stay those of the main model; embedding and head are the main model's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moetrain.config.model import ModelConfig
from moetrain.model.block import Block
from moetrain.model.layers import Linear, RMSNorm
from moetrain.model.rope import Rotation


class MTPModule(nn.Module):
    """One depth. ``norm`` is the released ``shared_head.norm``."""

    def __init__(self, config: ModelConfig, depth: int) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.norm = RMSNorm(d, eps), RMSNorm(d, eps), RMSNorm(d, eps)
        self.eh_proj = Linear(2 * d, d)
        self.block = Block(config, config.num_hidden_layers + depth - 1, depth)

    def forward(
        self, hidden_BTD: Tensor, embedded_BTD: Tensor, rotation: Rotation, document_ids: Tensor | None
    ) -> Tensor:
        """hidden: state after the previous norm; embedded: of the tokens k ahead -> state after this norm."""
        joined = torch.cat([self.enorm(embedded_BTD), self.hnorm(hidden_BTD)], dim=-1)
        y: Tensor = self.norm(self.block(self.eh_proj(joined), rotation, document_ids))
        return y


def shifted(ids_BT: Tensor, by: int) -> Tensor:
    """ids moved ``by`` places to the left; the tail, which no target asks for, repeats token 0."""
    return torch.cat([ids_BT[:, by:], ids_BT.new_zeros(ids_BT.shape[0], min(by, ids_BT.shape[1]))], dim=1)
