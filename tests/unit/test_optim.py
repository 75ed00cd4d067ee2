"""Schedules at the points that DeepSeek published; decay for the right parameters."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from moetrain.optim import (
    Constant,
    ConstantCosineConstant,
    Cosine,
    LearningRate,
    NoiseSteeredBatch,
    RampedBatch,
    StepDecay,
    build_adamw,
    parameter_groups,
)
from tests.support.small import FAMILIES, model

T = 1e12


def rate(schedule, peak, x):
    return peak * schedule.factor(x)


def test_v3s_schedule_at_its_published_points():
    """V3 paper 4.2: 2.2e-4 until 10T, cosine to 2.2e-5 over 4.3T, that for 333B, 7.3e-6 for the last 167B."""
    v3 = ConstantCosineConstant(10 * T, 4.3 * T, 0.1, 0.333 * T, 7.3e-6 / 2.2e-4)
    for x, want in [
        (0, 2.2e-4), (9.99 * T, 2.2e-4), (12.15 * T, (2.2e-4 + 2.2e-5) / 2), (14.3 * T, 2.2e-5), (14.6 * T, 2.2e-5),
        (14.634 * T, 7.3e-6), (14.8 * T, 7.3e-6),
    ]:  # fmt: skip
        assert rate(v3, 2.2e-4, x) == pytest.approx(want, rel=1e-6), x


def test_v2s_schedule_falls_twice_by_0316():
    v2 = StepDecay([0.6 * 8.1 * T, 0.9 * 8.1 * T], 0.316)
    assert [rate(v2, 2.4e-4, x * 8.1 * T) for x in (0.59, 0.61, 0.89, 0.91)] == pytest.approx(
        [2.4e-4, 2.4e-4 * 0.316, 2.4e-4 * 0.316, 2.4e-4 * 0.316**2]
    )


def test_cosine_ends_where_it_says_and_stays_there():
    cosine = Cosine(100, 0.1)
    assert [cosine.factor(x) for x in (0, 50, 100, 150)] == pytest.approx([1.0, 0.55, 0.1, 0.1])


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=1.0)


def test_warm_up_is_linear_and_counts_steps_also_where_the_schedule_counts_tokens():
    o = optimizer()
    rates = LearningRate(o, StepDecay([100], 0.5), peak=0.8, warmup_steps=4, unit="tokens")
    seen = []
    for _ in range(7):
        rates.next_batch(4, 20)
        seen.append(o.param_groups[0]["lr"])
        rates.step()
    assert seen == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.8, 0.4, 0.4])


def test_a_schedule_goes_on_where_it_was_saved():
    a, b = (LearningRate(optimizer(), Cosine(50, 0.0), peak=1.0, warmup_steps=3) for _ in range(2))
    for _ in range(17):
        a.next_batch(1, 5)
        a.step()
    b.load_state_dict(a.state_dict())
    assert b.lr == a.lr and b.optimizer.param_groups[0]["lr"] == a.lr and b.tokens == 85


def test_no_warm_up_means_the_peak_at_once():
    assert LearningRate(optimizer(), Constant(), peak=0.3).lr == 0.3


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_decay_and_vectors_do_not(family):
    m = model(FAMILIES[family])
    decay, rest = parameter_groups(m, 0.1)
    names = {id(p): name for name, p in m.named_parameters()}
    decayed, kept = ({names[id(p)] for p in group["params"]} for group in (decay, rest))
    assert decayed | kept == set(names.values()) and not decayed & kept
    assert all(name.endswith("norm.weight") for name in kept)
    assert not any("norm" in name for name in decayed)
    assert {"layers.1.mlp.gate.weight", "layers.1.mlp.experts.down_proj", "lm_head.weight"} <= decayed
    buffers = {id(b) for name, b in m.named_buffers() if name.endswith("e_score_correction_bias")}
    assert bool(buffers) == (family == "V3")
    assert not buffers & {id(p) for group in (decay, rest) for p in group["params"]}
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)


def test_fused_adamw_is_the_textbooks():
    m = model()
    before = {name: p.detach().clone() for name, p in m.named_parameters()}
    built, said = build_adamw(parameter_groups(m, 0.1), lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    g = torch.Generator().manual_seed(0)
    for p in m.parameters():
        p.grad = torch.randn(p.shape, generator=g, dtype=p.dtype)
    built.step()
    assert "AdamW" in said
    for name, p in m.named_parameters():
        wd = 0.1 if p.ndim > 1 else 0.0
        want = before[name] * (1 - 1e-2 * wd) - 1e-2 * p.grad / (p.grad.abs() + 1e-8)
        assert torch.allclose(p, want, rtol=1e-9, atol=1e-12), name
    assert math.isfinite(float(p.detach().sum()))


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_rate_follows_the_batch_by_its_rule(rule, factor):
    o = optimizer()
    rates = LearningRate(o, Constant(), peak=0.3, rule=rule, reference=8)
    assert rates.lr == 0.3
    rates.next_batch(32, 1)
    assert o.param_groups[0]["lr"] == pytest.approx(0.3 * factor)


def test_the_ramp_of_v3_goes_from_3072_to_15360_sequences_over_469_billion_tokens():
    over = int(469e9) // 4096
    ramp = RampedBatch(3072, 15360, over, 3072)
    assert [ramp.size(over * i // 8 + 1) for i in range(9)] == [3072, 3072, 6144, 6144, 9216, 9216, 12288, 12288, 15360]
    assert ramp.size(10 * over) == 15360 and ramp.size(over - 1) == 12288


def test_a_steered_batch_follows_the_measured_scale_within_its_bounds():
    sizes = NoiseSteeredBatch(8, 4, 64, increment=4, decay=0.5)
    assert sizes.size(0) == 8 and math.isnan(sizes.noise_scale)
    sizes.measured(noise=2000.0, signal=1.0, tokens_per_sequence=100.0)
    assert sizes.size(0) == 20 and sizes.noise_scale == 2000.0
    sizes.measured(noise=8000.0, signal=1.0, tokens_per_sequence=100.0)  # averages 2250 and 0.375, over the weight
    assert sizes.noise_scale == pytest.approx(6000.0) and sizes.size(0) == 60
    for noise, signal, want in ((1e9, 1.0, 64), (1e9, -100.0, 64), (-1e12, 1.0, 4)):
        sizes.measured(noise, signal, 100.0)
        assert sizes.size(0) == want, (noise, signal)
    other = NoiseSteeredBatch(8, 4, 64, increment=4, decay=0.5)
    other.load_state_dict(sizes.state_dict())
    assert vars(other) == vars(sizes)


def test_bf16_moments_are_adamw_with_rounded_moments():
    """Against the formula in float64; 1e-6: the step itself is in fp32."""
    g = torch.Generator().manual_seed(0)
    m = torch.nn.Linear(5, 7, bias=False)
    optimizer, how = build_adamw(parameter_groups(m, 0.1), lr=0.1, betas=(0.9, 0.95), eps=1e-8, moments="bf16")
    assert how.endswith("moments in bf16")
    w = m.weight.detach().double().clone()
    first, second = torch.zeros_like(w), torch.zeros_like(w)
    for step in range(1, 6):
        grad = torch.randn(7, 5, generator=g)
        m.weight.grad = grad.clone()
        optimizer.step()
        first = 0.9 * first + 0.1 * grad.double()
        second = 0.95 * second + 0.05 * grad.double() ** 2
        update = (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
        w = w * (1 - 0.1 * 0.1) - 0.1 * update
        assert torch.allclose(m.weight.detach().double(), w, rtol=1e-5, atol=1e-6)
        first, second = (x.float().bfloat16().double() for x in (first, second))
        w = m.weight.detach().double()
        assert {x.dtype for name, x in optimizer.state[m.weight].items() if name != "step"} == {torch.bfloat16}
    again = torch.nn.Linear(5, 7, bias=False)
    again.load_state_dict(m.state_dict())
    resumed, _ = build_adamw(parameter_groups(again, 0.1), lr=0.1, betas=(0.9, 0.95), eps=1e-8, moments="bf16")
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for model_, stepped in ((m, optimizer), (again, resumed)):
        model_.weight.grad = torch.ones(7, 5)
        stepped.step()
    assert torch.equal(m.weight, again.weight)
    assert resumed.state[again.weight]["exp_avg"].dtype == torch.bfloat16
