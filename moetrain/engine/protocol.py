"""What the training loop asks of an engine, and nothing more.

How gradients are run, reduced, clipped and stepped is the owner's business (``moetrain.accumulate.owners``); an engine
brings the model and the optimizer into being and says which owner goes with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from moetrain.accumulate.accumulator import Pipeline
from moetrain.accumulate.owners import GradientOwner


class Engine(Protocol):
    """A model and its optimizer, spread over the run's ranks.

    Attributes:
        model: called for losses and evaluation; its state is what a checkpoint holds.
        optimizer: its state likewise.
        owner: runs backwards, reduces, clips and steps.
        pipeline: runs micro-batches through stages; None where every rank has the whole model.
        applied: what was done to the model, a line each.
    """

    @property
    def model(self) -> nn.Module: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def owner(self) -> GradientOwner: ...

    @property
    def pipeline(self) -> Pipeline | None: ...

    @property
    def applied(self) -> Sequence[str]: ...
