"""What one step did. Device tensors until they are read, so that making a report costs no synchronisation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moetrain.accumulate.noise import GradientNoise
from moetrain.accumulate.traffic import Calls


@dataclass(frozen=True)
class StepReport:
    """One optimizer step, the same on every rank.

    Attributes:
        losses: each loss term as it was optimised: the model's terms, ``balance``, ``z``.
        total: their weighted sum, the number that was optimised.
        grad_norm: before clipping.
        valid_tokens, routed_tokens: of the global batch.
        load: int64 [L, E], routed tokens by router and expert, summed over ranks.
        skipped: None, or why the window was discarded.
        learning_rate: of the first parameter group, as used.
        traffic: collectives and bytes of this rank's step by kind.
        noise: the step's estimates for the gradient noise scale, where they were asked for and could be had.
        loss_scale: the factor of the loss that was used (fp16).
    """

    losses: Mapping[str, Tensor]
    total: Tensor
    grad_norm: Tensor
    valid_tokens: Tensor
    routed_tokens: Tensor
    load: Tensor
    skipped: str | None
    learning_rate: float
    traffic: Mapping[str, Calls] = field(default_factory=dict)
    noise: GradientNoise | None = None
    loss_scale: float = 1.0

    @property
    def max_violation(self) -> Tensor:
        """[L]: ``(max load - mean load) / mean load`` by router (arXiv 2408.15664)."""
        mean = self.load.to(torch.float64).mean(dim=-1).clamp(min=1e-300)
        worst = self.load.amax(dim=-1).to(torch.float64) if self.load.numel() else mean
        return worst / mean - 1.0
