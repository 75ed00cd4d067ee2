"""How many sequences the next global batch has: always the same, growing as DeepSeek's did, or following the noise.

A size is a function of what was consumed before it, never of ranks or micro-batches, so every layout takes the same
batches.
"""

from __future__ import annotations

from typing import Any, Protocol


class BatchSizes(Protocol):
    """``size(consumed)``: sequences of the next batch, after ``consumed`` sequences.

    Attributes:
        foreseeable: the size depends on ``consumed`` alone, so a batch may be prepared before the last one is stepped.
    """

    foreseeable: bool

    def size(self, consumed: int) -> int: ...


class FixedBatch:
    """``sequences`` always."""

    foreseeable = True

    def __init__(self, sequences: int) -> None:
        self.sequences = sequences

    def size(self, consumed: int) -> int:
        return self.sequences


class RampedBatch:
    """From ``start`` to ``end`` over the first ``over`` sequences, in steps of ``increment``.

    V2: 2304 to 9216 over 225B tokens (paper 3.1.2); V3: 3072 to 15360 over 469B (paper 4.2). The growth between is
    'gradual' there; here it is linear in what was consumed, rounded down to a whole increment.
    """

    foreseeable = True

    def __init__(self, start: int, end: int, over: int, increment: int) -> None:
        self.start, self.end, self.over, self.increment = start, end, over, increment

    def size(self, consumed: int) -> int:
        if consumed >= self.over:
            return self.end
        grown = (self.end - self.start) * consumed // self.over
        return self.start + grown // self.increment * self.increment


class NoiseSteeredBatch:
    """Follows the gradient noise scale between two bounds (arXiv 1812.06162: the batch where time and data balance).

    Noise and signal of single steps are wild, so both are averaged (exponentially) before one is divided by the other.

    Args:
        start, smallest, largest: sequences.
        increment: sizes are ``smallest`` and whole increments above it.
        decay: of the averages, per accepted step.
    """

    foreseeable = False

    def __init__(self, start: int, smallest: int, largest: int, *, increment: int, decay: float = 0.95) -> None:
        self.smallest, self.largest, self.increment, self.decay = smallest, largest, increment, decay
        self.sequences = start
        self.noise = self.signal = self.weight = 0.0

    def size(self, consumed: int) -> int:
        return self.sequences

    @property
    def noise_scale(self) -> float:
        """Valid tokens; infinite while the averaged signal is not positive, nan before anything was measured."""
        if not self.weight:
            return float("nan")
        return self.noise / self.signal if self.signal > 0 else float("inf")

    def measured(self, noise: float, signal: float, tokens_per_sequence: float) -> None:
        """One accepted step's estimates (``StepReport.noise``) and its mean valid tokens per sequence."""
        keep = self.decay
        self.noise = keep * self.noise + (1 - keep) * noise
        self.signal = keep * self.signal + (1 - keep) * signal
        self.weight = keep * self.weight + (1 - keep)
        if self.noise <= 0:
            self.sequences = self.smallest
            return
        wanted = min(self.noise_scale / tokens_per_sequence, float(self.largest))
        steps = int(max(wanted - self.smallest, 0.0) // self.increment)
        self.sequences = min(self.smallest + steps * self.increment, self.largest)

    def state_dict(self) -> dict[str, Any]:
        return {"sequences": self.sequences, "noise": self.noise, "signal": self.signal, "weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sequences = int(state["sequences"])
        self.noise, self.signal, self.weight = (float(state[key]) for key in ("noise", "signal", "weight"))
