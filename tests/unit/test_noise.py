"""The gradient noise scale against gradients whose noise is known."""

from __future__ import annotations

import torch

from moetrain.accumulate import Balance, MoEAccumulator
from moetrain.accumulate.noise import gradient_noise, part_statistics
from moetrain.model import DeepSeekLoss
from tests.support.small import V3, model, window

G = torch.tensor([3.0, 4.0, 0.0, 0.0], dtype=torch.float64)  # |G|^2 = 25
SIGMA = 2.0  # of each of the 4 components: S = 16


def estimates(sizes: list[int]) -> torch.Tensor:
    """(noise, signal) [4000, 2] of drawn batches whose parts have ``sizes`` tokens."""
    g = torch.Generator().manual_seed(0)
    total = torch.tensor(float(sum(sizes)), dtype=torch.float64)
    out = []
    for _ in range(4000):
        tokens = G + SIGMA * torch.randn(sum(sizes), 4, generator=g, dtype=torch.float64)
        sums = [part.sum(dim=0) / total for part in tokens.split(sizes)]
        parts = sum(part_statistics(s.square().sum(), torch.tensor(n), total) for s, n in zip(sums, sizes, strict=True))
        out.append(torch.stack(gradient_noise(parts, sum(sums).norm(), total)))
    return torch.stack(out)


def test_the_estimates_are_unbiased_also_with_unequal_and_empty_parts():
    for sizes in ([8, 8], [1, 3, 12], [5, 0, 11]):
        drawn = estimates(sizes)
        error = drawn.std(dim=0) / len(drawn) ** 0.5
        off = (drawn.mean(dim=0) - torch.tensor([16.0, 25.0], dtype=torch.float64)).abs()
        assert bool((off < 4 * error).all()) and bool((error < torch.tensor([0.5, 0.1])).all()), (sizes, off, error)


def test_one_process_measures_with_its_first_micro_batch():
    def reported(sizes):
        m = model()
        accumulator = MoEAccumulator(
            m, torch.optim.SGD(m.parameters(), lr=0.1), loss=DeepSeekLoss(V3), balance=Balance(), measure_noise=True
        )
        return accumulator.step(window(sizes))

    report = reported([2, 4])
    assert report.noise is not None and torch.isfinite(report.noise.noise) and torch.isfinite(report.noise.signal)
    # by hand: |g_small|^2 and |g_big|^2 solve E|g_n|^2 = |G|^2 + S/n
    small = first_gradient_square()
    n, total = float((window([2, 4])[0].targets() != -100).sum()), float(report.valid_tokens)
    big = float(report.grad_norm) ** 2
    want = (small * (total / n) ** 2 - big) / (1 / n - 1 / total)
    assert abs(float(report.noise.noise) - want) < 1e-9 * abs(want)
    assert reported([6]).noise is None  # the only part is the whole


def first_gradient_square():
    """Squared norm of the first micro-batch's part of the step's gradient, by autograd."""
    m = model()
    w = window([2, 4])
    loss = DeepSeekLoss(V3)
    valid = [sum((item.targets(k + 1) != -100).sum() for item in w) for k in (0, 1)]
    scale = torch.tensor([weight / int(n) for weight, n in zip(loss.weights, valid, strict=True)], dtype=torch.float64)
    (loss(m, w[0]) * scale).sum().backward()
    return float(sum(p.grad.square().sum() for p in m.parameters() if p.grad is not None))
