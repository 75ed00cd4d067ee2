"""Gradient accumulation that knows about experts, as a library for anybody's loop. Imports torch only."""

from moetrain.accumulate.accumulator import MoEAccumulator
from moetrain.accumulate.balance import Balance, update_bias
from moetrain.accumulate.denominators import Denominators, count_denominators
from moetrain.accumulate.ledger import Router, RoutingLedger, find_routers
from moetrain.accumulate.loss_scale import LossScale
from moetrain.accumulate.losses import CausalLMLoss, Loss, causal_lm_loss
from moetrain.accumulate.norm import grad_norm
from moetrain.accumulate.report import StepReport
from moetrain.accumulate.window import MicroBatch, Window, windows

__all__ = [
    "Balance",
    "CausalLMLoss",
    "Denominators",
    "Loss",
    "LossScale",
    "MicroBatch",
    "MoEAccumulator",
    "Router",
    "RoutingLedger",
    "StepReport",
    "Window",
    "causal_lm_loss",
    "count_denominators",
    "find_routers",
    "grad_norm",
    "update_bias",
    "windows",
]
