"""The gradient noise scale, from gradient norms before and after the reduction: no extra backward.

A rank's own gradient is a mean over fewer tokens than the step's; how much larger its norm is says how noisy a token's
gradient is (arXiv 1812.06162, appendix A.1, here with unequal tokens per rank):
``E |g_n|^2 = |G|^2 + S / n``, for a mean over n tokens, true gradient G and S the trace of a token's covariance.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class GradientNoise(NamedTuple):
    """One step's unbiased estimates, float64 []; either may be negative by chance, so average both before dividing.

    noise: S, trace of the covariance of one valid token's gradient. signal: |G|^2. ``noise / signal``: the batch, in
    valid tokens, beyond which larger ones gain little.
    """

    noise: Tensor
    signal: Tensor


def part_statistics(square: Tensor, tokens: Tensor, total: Tensor) -> Tensor:
    """float64 [3], to be summed over parts: ``|g_part|^2``, ``1 / tokens``, 1; zeros for a part without tokens.

    Args:
        square: squared norm of the part's gradient *sum* divided by ``total``.
        tokens, total: valid tokens of the part and of the whole batch.
    """
    n = tokens.to(torch.float64).clamp(min=1)
    out = torch.stack([square.to(torch.float64) * (total / n).square(), 1.0 / n, torch.ones_like(n)])
    return torch.where(tokens > 0, out, torch.zeros_like(out))


def gradient_noise(parts: Tensor, norm: Tensor, total: Tensor) -> GradientNoise:
    """From summed ``part_statistics`` and the norm of the whole gradient. nan where the only part is the whole."""
    mean, inverse = parts[0] / parts[2], parts[1] / parts[2]
    whole = norm.to(torch.float64).square()
    noise = (mean - whole) / (inverse - 1.0 / total.clamp(min=1))
    return GradientNoise(noise=noise, signal=whole - noise / total.clamp(min=1))
