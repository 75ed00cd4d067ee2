"""Routers of transformers' mixture-of-experts models, without a change to their code.

Their routers return ``(logits, weights, choice)``, and the losses here need two things of them: to see these, and to
put a gradient into the logits. A forward hook does both. The weights pass through an identity that hands the balance
gradient on to the scores, so it flows wherever the router's own gradient flows, also under recompute.

A choice that is replayed (in recompute, after a counting pass, or given from outside) replaces the router's own: where
the two differ for a token, its weights are computed here from the router's scores, as its own code weighs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from moetrain.accumulate.balance import Routing
from moetrain.accumulate.ledger import Router, Tap

#: router class -> whether its scores are sigmoids with a bias that selects
ROUTERS = {
    "DeepseekV2TopkRouter": False,
    "DeepseekV3TopkRouter": True,
    "Qwen3MoeTopKRouter": False,
    "MixtralTopKRouter": False,
}


def transformers_routers(model: nn.Module) -> list[Router]:
    """The routers of a DeepSeek-V2, DeepSeek-V3, Qwen3-MoE or Mixtral model, plain or wrapped, in its order.

    Give them to ``MoEAccumulator(..., routers=transformers_routers(model))``; V3 models then also get the update of
    their routing bias, which transformers loads and never moves.
    """
    return [_router(name, m) for name, m in model.named_modules() if type(m).__name__ in ROUTERS]


def _router(name: str, module: Any) -> Router:
    sigmoid = ROUTERS[type(module).__name__]
    groups = getattr(module, "num_group", None) or 1
    routing = Routing(
        experts=module.weight.shape[0],
        top_k=module.top_k,
        groups=groups,
        top_groups=getattr(module, "topk_group", None) or 1,
    )
    normalises = getattr(module, "norm_topk_prob", type(module).__name__ == "MixtralTopKRouter")
    factor = getattr(module, "routed_scaling_factor", 1.0)
    handles: list[Any] = []

    def attach(tap: Tap | None) -> None:
        while handles:
            handles.pop().remove()
        if tap is not None:
            handles.append(module.register_forward_hook(_hook(tap, sigmoid, normalises, factor)))

    return Router(
        name=name,
        routing=routing,
        attach=attach,
        sigmoid=sigmoid,
        plain_balance=sigmoid,
        bias=lambda: getattr(module, "e_score_correction_bias", None),
    )


def _hook(tap: Tap, sigmoid: bool, normalises: bool, factor: float) -> Any:
    def hook(module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights, own = output
        choice = tap.choice(module, lambda: own)
        # always, and not only in a replay: recompute wants the operations of the first forward
        other = _scores(logits, sigmoid).gather(1, choice)
        if normalises:
            other = other / other.sum(dim=-1, keepdim=True)
        same = (choice == own).all(dim=-1, keepdim=True)
        weights = torch.where(same, weights, (other * factor).to(weights.dtype))
        z = tap.logits(module, logits.to(torch.promote_types(logits.dtype, torch.float32)))
        scores = tap.scores(module, _scores(z, sigmoid), choice)
        carried: Tensor = _Carry.apply(weights, scores)
        return logits, carried, choice

    return hook


def _scores(logits: Tensor, sigmoid: bool) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.sigmoid() if sigmoid else logits.softmax(dim=-1)


class _Carry(torch.autograd.Function):
    """Identity on the weights; its backward starts the scores' backward, with nothing of its own."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, scores: Tensor) -> Tensor:
        ctx.like = (scores.shape, scores.dtype, scores.device)
        return weights.view_as(weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        shape, dtype, device = ctx.like
        return g, torch.zeros(shape, dtype=dtype, device=device)
