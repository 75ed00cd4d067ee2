"""Balance losses: what they are, and which counts their ``f`` is read from.

The gradient of a balance loss with respect to a token's router probability p_i is a number per expert, the same for all
tokens that share a scope: ``alpha f_i / N``, where f holds counts (no gradient) and N is the global number of routed
tokens (V2 paper eqs 23-31, V3 paper eqs 17-20, global-batch balance: arXiv 2501.11873). This module computes those
numbers; the ledger keeps the counts and puts the numbers into the router's backward.

Legend: T tokens, E experts, G expert groups (a "device" of the V2 losses), S statistics, K experts per token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Scope = Literal["sequence", "micro_batch", "running", "previous", "window"]


@dataclass(frozen=True)
class Balance:
    """How experts are kept balanced.

    Args:
        scope: whose counts f are read from: each ``sequence``'s own (V2, V3; exact by definition), this
            ``micro_batch``'s, the window so far over all ranks (``running``), the last accepted step's (``previous``),
            or the whole global batch's (``window``; exact).
        alpha: weight of the expert-level loss (V2: 0.003, V3: 1e-4).
        alpha_device: weight of the device-level loss over expert groups (V2: 0.05).
        alpha_communication: weight of the communication loss over expert groups (V2: 0.02).
        z_loss: weight of the mean squared logsumexp of the router's logits.
        bias_rate: step of the routing bias per accepted optimizer step (V3: 0.001; 0 = the bias stays).
        zero_centred: keep the mean of each bias update at zero (not in the paper).
    """

    scope: Scope = "sequence"
    alpha: float = 0.0
    alpha_device: float = 0.0
    alpha_communication: float = 0.0
    z_loss: float = 0.0
    bias_rate: float = 0.0
    zero_centred: bool = False

    def __post_init__(self) -> None:
        scopes = ("sequence", "micro_batch", "running", "previous", "window")
        if self.scope not in scopes:
            raise ValueError(f"balance scope must be one of {', '.join(scopes)}, not {self.scope!r}")
        for name in ("alpha", "alpha_device", "alpha_communication", "z_loss", "bias_rate"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0.0 <= value < math.inf:
                raise ValueError(f"balance {name} must be a number from 0 on, not {value!r}")

    @property
    def active(self) -> bool:
        """Whether any balance loss has a weight (the z-loss and the bias are separate)."""
        return bool(self.alpha or self.alpha_device or self.alpha_communication)


@dataclass(frozen=True)
class Routing:
    """The facts of a router that the formulas need (from the gate)."""

    experts: int
    top_k: int
    groups: int
    top_groups: int

    def counts(self, choice_TK: Tensor, mask_T: Tensor | None, rows: int = 1) -> Tensor:
        """int64 [rows, E]: routed tokens that chose each expert, by row (T tokens lie row by row)."""
        T = choice_TK.shape[0]
        index = choice_TK
        if rows > 1:
            row = torch.arange(rows, device=choice_TK.device).repeat_interleave(T // rows)
            index = choice_TK + (row * self.experts).unsqueeze(1)
        if mask_T is None:
            one = choice_TK.new_ones(()).expand(choice_TK.numel())
        else:
            one = mask_T.to(torch.int64).unsqueeze(1).expand_as(choice_TK).reshape(-1)
        flat = torch.zeros(rows * self.experts, dtype=torch.int64, device=choice_TK.device)
        return flat.scatter_add_(0, index.flatten(), one).view(rows, self.experts)

    def group_counts(self, choice_TK: Tensor, mask_T: Tensor | None, rows: int = 1) -> Tensor:
        """int64 [rows, G]: routed tokens with at least one chosen expert in each group."""
        touched_TG = torch.zeros(choice_TK.shape[0], self.groups, dtype=torch.int64, device=choice_TK.device)
        touched_TG.scatter_(1, choice_TK // (self.experts // self.groups), 1)
        if mask_T is not None:
            touched_TG *= mask_T.unsqueeze(1)
        return touched_TG.view(rows, -1, self.groups).sum(dim=1)

    def statistics(self, balance: Balance, choice_TK: Tensor, mask_T: Tensor | None, rows: int = 1) -> Tensor:
        """int64 [rows, S]: what the losses in ``balance`` need to know of a micro-batch."""
        counts = self.counts(choice_TK, mask_T, rows)
        if not balance.alpha_communication:
            return counts
        return torch.cat([counts, self.group_counts(choice_TK, mask_T, rows)], dim=1)

    def width(self, balance: Balance) -> int:
        """S: tokens per expert, then, where the communication loss needs them, tokens per group."""
        return self.experts + (self.groups if balance.alpha_communication else 0)

    def coefficients(self, balance: Balance, statistics: Tensor, tokens: Tensor) -> Tensor:
        """``alpha f + alpha_device f' + alpha_communication f''`` per expert, [..., E] in ``tokens``' dtype.

        Args:
            statistics: [..., S] counts.
            tokens: [...] routed tokens they are from; 0 tokens give 0.
        """
        share = statistics.to(tokens.dtype) / tokens.clamp(min=1).unsqueeze(-1)
        f = share[..., : self.experts] * (self.experts / self.top_k)
        c = balance.alpha * f
        if balance.alpha_device:
            per_group = f.unflatten(-1, (self.groups, -1)).mean(dim=-1)
            c = c + balance.alpha_device * self._spread(per_group)
        if balance.alpha_communication:
            sent = share[..., self.experts :] * (self.groups / self.top_groups)
            c = c + balance.alpha_communication * self._spread(sent)
        return c

    def _spread(self, per_group: Tensor) -> Tensor:
        """A group's number for each of its experts: P_g is the sum over them."""
        return per_group.repeat_interleave(self.experts // self.groups, dim=-1)


def check_bias(bias_E: Tensor | None) -> None:
    """Raises ValueError for a bias in less than fp32, where steps of 1e-3 vanish."""
    if bias_E is not None and bias_E.dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"a routing bias must be kept in fp32, not {bias_E.dtype}, where its steps would vanish: cast "
            "e_score_correction_bias back with .float() after casting the model"
        )


@torch.no_grad()
def update_bias(bias_E: Tensor, load_E: Tensor, rate: float, *, zero_centred: bool = False) -> None:
    """``b += rate * sign(mean(load) - load)`` in place (V3 paper 2.1.2; arXiv 2408.15664 algorithm 1).

    Args:
        bias_E: fp32 [E].
        load_E: integers [E], tokens of the whole global batch by expert; scaling it changes nothing.
        rate: step size.
        zero_centred: subtract the step's mean, so that the bias' mean stays.

    Raises:
        ValueError: the bias is kept in less than fp32, where steps of 1e-3 vanish.
    """
    check_bias(bias_E)
    load_E = load_E.to(torch.int64)
    step = (load_E.sum() - load_E * load_E.numel()).sign().to(bias_E.dtype)
    if zero_centred:
        step = step - step.mean()
    bias_E.add_(step, alpha=rate)
