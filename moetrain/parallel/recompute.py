"""Activation recompute: a block keeps only its input and runs again in the backward.

The routing of the second run is the first one's: the ledger replays each router's choice, so a tie or low-precision
jitter cannot send a token elsewhere (see ``moetrain.accumulate.ledger``).
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute_in_backward(module: nn.Module) -> None:
    """Replaces ``module.forward``; names of parameters and hooks of wrappers stay as they are."""
    forward = module.forward

    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        # the model draws no random numbers, so there is no generator state to bring back
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    module.forward = checkpointed
