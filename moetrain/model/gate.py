"""The three routers of the DeepSeek family, and the place where a window looks at them.

A gate scores experts, chooses, and weighs. What differs between V2-Lite, V2 and V3 is only how it chooses, so each is a
class with its own ``choose``. Everything is in fp32 at least. A gate counts nothing itself: an observer (the
accumulation core's ledger) may be attached, sees logits, choices and scores, and can put gradients in or replay
choices. Without an observer (evaluation, inference) a gate has no state.

Legend: T tokens of a micro-batch, D width, E experts, K experts per token, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from moetrain.config.model import ModelConfig
from moetrain.model.layers import at_least_fp32
from moetrain_kernels.products import linear


class GateObserver(Protocol):
    """What a window attaches to every gate; all three return what the gate goes on with."""

    def logits(self, gate: Gate, logits_TE: Tensor) -> Tensor: ...

    def choice(self, gate: Gate, choose: Callable[[], Tensor]) -> Tensor: ...

    def scores(self, gate: Gate, scores_TE: Tensor, choice_TK: Tensor) -> Tensor: ...


class Route(Protocol):
    """Scores of logits [T, E], differentiable, and what makes the choice [T, K] int64 of them."""

    def __call__(self, gate: Gate, logits_TE: Tensor) -> tuple[Tensor, Callable[[], Tensor]]: ...


def route_by_torch(gate: Gate, logits_TE: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """As the gate's own ``score`` and ``choose`` are written; every dtype, every device."""
    scores = gate.score(logits_TE)
    return scores, lambda: gate.choose(scores.detach())


class Gate(nn.Module):
    """Greedy softmax gate (V2-Lite, facts C.1), and what all gates share.

    Attributes read by observers:
        depth: 0 in the main model, k in MTP module k.
        sigmoid: scores are sigmoids, which balance losses normalise over all experts (V3 paper eqs 17-20).
        plain_balance: balance losses count the plain top-k of the scores, not the choice (V3 paper eq 18).

    What a kernel has to know besides: ``grouped``, the choice is among the best groups, and ``two_of_group``, by the
    sum of their two best experts.
    """

    in_place_grad: bool = False
    sigmoid = False
    plain_balance = False
    grouped = False
    two_of_group = False
    route: Route

    def __init__(self, config: ModelConfig, depth: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_routed_experts, config.hidden_size))
        self.experts, self.top_k = config.n_routed_experts, config.num_experts_per_tok
        self.groups, self.top_groups = config.n_group, config.topk_group
        self.normalise, self.factor = config.norm_topk_prob, config.routed_scaling_factor
        self.depth = depth
        self.route = route_by_torch
        self.observer: GateObserver | None = None

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        """x_TD -> chosen experts [T, K] int64 and their weights [T, K], at least fp32."""
        in_place = self.in_place_grad and self.weight.dtype == at_least_fp32(self.weight).dtype
        logits = linear(at_least_fp32(x_TD), at_least_fp32(self.weight), in_place_grad=in_place)
        if self.observer is None:
            scores, choose = self.route(self, logits)
            choice = choose()
        else:
            scores, choose = self.route(self, self.observer.logits(self, logits))
            choice = self.observer.choice(self, choose)
            scores = self.observer.scores(self, scores, choice)
        return choice, self.weigh(scores.gather(1, choice))

    def score(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.softmax(dim=-1)

    def choose(self, scores_TE: Tensor) -> Tensor:
        """[T, K] int64: the experts of each token (facts C)."""
        return scores_TE.topk(self.top_k, dim=-1, sorted=False).indices

    def weigh(self, chosen_TK: Tensor) -> Tensor:
        """V2: either normalised over the chosen, or scaled (released code; facts C.3)."""
        if self.normalise:
            return chosen_TK / chosen_TK.sum(dim=-1, keepdim=True)
        return chosen_TK * self.factor

    def _outside(self, group_score_TG: Tensor) -> Tensor:
        """[T, E] bool: the experts outside the best ``topk_group`` groups."""
        best = group_score_TG.topk(self.top_groups, dim=-1, sorted=False).indices
        shut = torch.ones_like(group_score_TG, dtype=torch.bool).scatter_(1, best, False)
        return shut.repeat_interleave(self.experts // self.groups, dim=1)


class GroupLimitedGate(Gate):
    """V2: a group's score is its best expert's (V2 paper 2.2.2); the choice is among the best groups."""

    grouped = True

    def choose(self, scores_TE: Tensor) -> Tensor:
        group_score = scores_TE.unflatten(1, (self.groups, -1)).amax(dim=-1)
        return super().choose(scores_TE.masked_fill(self._outside(group_score), -torch.inf))


class NoAuxTcGate(Gate):
    """V3: sigmoid scores; a bias that only selects; a group's score is the sum of its two best (V3 paper eqs 12-16).

    Experts of other groups get minus infinity, not zero: biased scores may be negative, and a zero would win.
    ``e_score_correction_bias`` [E] stays fp32 whatever the model is cast to: steps of 1e-3 vanish in bf16.
    """

    sigmoid = True
    plain_balance = True
    grouped = True
    two_of_group = True

    def __init__(self, config: ModelConfig, depth: int = 0) -> None:
        super().__init__(config, depth)
        self.register_buffer("e_score_correction_bias", torch.zeros(self.experts, dtype=torch.float32))
        self.e_score_correction_bias: Tensor

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)
        after = self.e_score_correction_bias
        if after.dtype != before.dtype:
            self.e_score_correction_bias = before.to(after.device)
        return self

    def score(self, logits_TE: Tensor) -> Tensor:
        return logits_TE.sigmoid()

    def choose(self, scores_TE: Tensor) -> Tensor:
        biased = scores_TE + self.e_score_correction_bias
        if self.groups > 1:
            group_score = biased.unflatten(1, (self.groups, -1)).topk(2, dim=-1, sorted=False).values.sum(dim=-1)
            biased = biased.masked_fill(self._outside(group_score), -torch.inf)
        return super().choose(biased)

    def weigh(self, chosen_TK: Tensor) -> Tensor:
        """V3: normalised over the chosen, then scaled."""
        if self.normalise:
            chosen_TK = chosen_TK / (chosen_TK.sum(dim=-1, keepdim=True) + 1e-20)
        return chosen_TK * self.factor


GATES: dict[str, type[Gate]] = {
    "greedy": Gate,
    "group_limited_greedy": GroupLimitedGate,
    "noaux_tc": NoAuxTcGate,
}
