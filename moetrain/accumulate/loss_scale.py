"""Dynamic loss scaling for fp16, whose gradients vanish below 6e-8.

The loss is multiplied by a power of two and the gradient norm divided by it; a window that overflows is discarded by
the step's one verdict, on every rank, and halves the scale. (torch's GradScaler judges each optimizer and rank by its
own inf check, and does not know of routing statistics.)
"""

from __future__ import annotations

import math
from typing import Any


class LossScale:
    """Factor of the loss: doubled after ``interval`` accepted windows in a row, halved after an overflow.

    Args:
        value: the first scale, a power of two so that scaling rounds nothing.
        interval: accepted windows in a row before the scale doubles.
        smallest: it never falls below this.
    """

    def __init__(self, value: float = 2.0**16, *, interval: int = 2000, smallest: float = 1.0) -> None:
        if value <= 0 or math.frexp(value)[0] != 0.5:
            raise ValueError(f"a loss scale must be a power of two, not {value}")
        if interval < 1:
            raise ValueError(f"interval must be at least 1 window, not {interval}")
        self.value, self.interval, self.smallest = float(value), interval, smallest
        self.good = 0  # accepted windows since the last change

    def accepted(self) -> None:
        self.good += 1
        if self.good == self.interval:
            self.value, self.good = self.value * 2.0, 0

    def overflowed(self) -> None:
        self.value, self.good = max(self.value / 2.0, self.smallest), 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "good": self.good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.good = float(state["value"]), int(state["good"])
