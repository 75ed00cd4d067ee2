"""Learning-rate schedules as DeepSeek published them, by steps or by tokens.

A schedule is a function from how far a run is to a fraction of the peak rate. ``LearningRate`` counts accepted steps
and sets the optimizer's rate; it is stepped by whoever knows that a step was accepted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch


class Schedule(Protocol):
    """``factor(x)``: fraction of the peak rate at x, in the schedule's unit, warm-up not included."""

    def factor(self, x: float) -> float: ...


class Constant:
    """The peak, for ever."""

    def factor(self, x: float) -> float:
        return 1.0


class Cosine:
    """A half cosine from the peak at 0 to ``final`` at ``total``."""

    def __init__(self, total: float, final: float) -> None:
        self.total, self.final = total, final

    def factor(self, x: float) -> float:
        return self.final + (1.0 - self.final) * _half_cosine(x / self.total)


class StepDecay:
    """Multiplied by ``factor_each`` at each of ``at`` (V2 paper 3.1.2: 0.316 at 60 % and 90 % of the tokens)."""

    def __init__(self, at: Sequence[float], factor_each: float) -> None:
        self.at, self.factor_each = tuple(at), factor_each

    def factor(self, x: float) -> float:
        return self.factor_each ** sum(x >= point for point in self.at)


class ConstantCosineConstant:
    """V3's (V3 paper 4.2): the peak for ``constant``, a half cosine to ``ratio`` over ``cosine``, ``ratio`` for
    ``hold``, then ``last``. Published: 10T, 4.3T to 0.1, 333B, then 7.3e-6 of 2.2e-4."""

    def __init__(self, constant: float, cosine: float, ratio: float, hold: float, last: float) -> None:
        self.constant, self.cosine, self.ratio, self.hold, self.last = constant, cosine, ratio, hold, last

    def factor(self, x: float) -> float:
        if x >= self.constant + self.cosine + self.hold:
            return self.last
        return self.ratio + (1.0 - self.ratio) * _half_cosine((x - self.constant) / self.cosine)


def _half_cosine(share: float) -> float:
    """1 at 0, 0 at 1, constant outside."""
    return 0.5 * (1.0 + math.cos(math.pi * min(max(share, 0.0), 1.0)))


BatchRule = Literal["none", "linear", "sqrt"]


def batch_factor(rule: BatchRule, sequences: int, reference: int) -> float:
    """What the learning rate is multiplied by for a batch of ``sequences``."""
    ratio = sequences / reference
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[rule]


class LearningRate:
    """Sets every group's rate to ``peak * warm-up * schedule``, from the accepted steps and their tokens.

    Args:
        optimizer: its groups get the rate.
        schedule: factor by progress.
        peak: the highest rate.
        warmup_steps: linear from 0; step n (1, 2, ...) of the warm-up trains at n / warmup_steps of the peak.
        unit: what the schedule's argument counts.
        rule: how the rate follows the batch where it differs from ``reference``: not at all, ``linear``
            (arXiv 1706.02677), or by the square root (arXiv 2205.10287, for Adam).
        reference: sequences of the batch that ``peak`` is for.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        *,
        peak: float,
        warmup_steps: int = 0,
        unit: Literal["steps", "tokens"] = "steps",
        rule: BatchRule = "none",
        reference: int = 1,
    ) -> None:
        self.optimizer, self.schedule = optimizer, schedule
        self.peak, self.warmup_steps, self.unit = peak, warmup_steps, unit
        self.rule, self.reference = rule, reference
        self.steps = self.tokens = 0
        self.sequences, self.batch_tokens = reference, 0
        self._set()

    @property
    def lr(self) -> float:
        """The rate of the next step."""
        warm = min(1.0, (self.steps + 1) / self.warmup_steps) if self.warmup_steps else 1.0
        at = self.steps if self.unit == "steps" else self.tokens
        return self.peak * warm * self.schedule.factor(at) * batch_factor(self.rule, self.sequences, self.reference)

    def next_batch(self, sequences: int, tokens: int) -> None:
        """The size of the batch that is stepped next."""
        self.sequences, self.batch_tokens = sequences, tokens
        self._set()

    def step(self) -> None:
        """A step of the batch last named was accepted."""
        self.steps += 1
        self.tokens += self.batch_tokens
        self._set()

    def _set(self) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "tokens": self.tokens}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.tokens = int(state["steps"]), int(state["tokens"])
        self._set()
