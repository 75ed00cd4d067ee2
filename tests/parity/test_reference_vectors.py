"""Published and derived numbers that need no other implementation (facts B.4, J)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml

from moetrain.accumulate import update_bias
from moetrain.config.model import ModelConfig
from moetrain.model.gate import NoAuxTcGate
from moetrain.model.rope import correction_range, inverse_frequencies, rotation, softmax_scale
from moetrain_kernels.mla_attention import rotate_pairs

CONFIGS = Path(__file__).parents[2] / "configs"


def config_of(scale, **over):
    return ModelConfig(**(yaml.safe_load((CONFIGS / scale / "model.yaml").read_text()) | over))


def test_yarn_bends_frequencies_between_10_and_23():
    config = config_of("671B")
    assert config.rope_scaling is not None
    assert correction_range(config.rope_scaling, 64, 10000.0) == (10, 23)
    f = inverse_frequencies(config)
    for i, want in [(0, 1.0), (10, 0.0562341), (16, 0.0055), (23, 3.33380e-5), (31, 3.33380e-6)]:
        assert float(f[i]) == pytest.approx(want, rel=2e-5), i


@pytest.mark.parametrize(("scale", "want"), [("16B", 0.1147214), ("236B", 0.1147214), ("671B", 0.1352338)])
def test_softmax_scale_with_and_without_yarn(scale, want):
    assert softmax_scale(config_of(scale)) == pytest.approx(want, rel=1e-6)
    assert softmax_scale(config_of(scale, rope_scaling=None)) == pytest.approx(0.0721688, rel=1e-6)


@pytest.mark.parametrize("scale", ["16B", "236B", "671B"])
def test_cos_and_sin_carry_no_factor_in_released_models(scale):
    turn = rotation(config_of(scale), torch.arange(50).unsqueeze(0), torch.float64)
    assert torch.allclose(turn.cos**2 + turn.sin**2, torch.ones((), dtype=torch.float64))


def test_adjacent_pairs_and_deinterleaved_halves_give_the_same_products():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 8, 64, dtype=torch.float64)
    turn = rotation(config_of("671B"), torch.arange(8).unsqueeze(0), torch.float64)
    pairs = [rotate_pairs(x, turn.cos, turn.sin, torch.empty_like(x)) for x in (q, k)]

    def halves(x, deinterleave):
        if deinterleave:
            x = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * turn.cos - b * turn.sin, b * turn.cos + a * turn.sin], dim=-1)

    want = pairs[0] @ pairs[1].mT
    assert torch.allclose(halves(q, True) @ halves(k, True).mT, want)
    assert not torch.allclose(halves(q, False) @ halves(k, False).mT, want)


def test_odd_layouts_rotate_like_even_ones():
    """Where pairs cannot be seen as complex numbers (an odd offset), the real formula gives the same."""
    x = torch.randn(3, 5, 9, dtype=torch.float64)
    turn = rotation(config_of("671B", qk_rope_head_dim=8), torch.arange(5).unsqueeze(0), torch.float64)
    odd, even = x[..., 1:], x[..., 1:].contiguous()
    got = rotate_pairs(odd, turn.cos, turn.sin, torch.empty(3, 5, 9, dtype=torch.float64)[..., 1:])
    assert torch.allclose(got, rotate_pairs(even, turn.cos, turn.sin, torch.empty_like(even)))


def gate(**over):
    small = {"n_routed_experts": 256, "hidden_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1}
    return NoAuxTcGate(config_of("671B", **(small | over)))


def test_uniform_scores_weigh_2_5_eighths():
    g = gate()
    torch.nn.init.zeros_(g.weight)
    _, weight = g(torch.randn(4, 16))
    assert torch.allclose(weight, torch.full((4, 8), 2.5 / 8))


def test_a_constant_added_to_every_bias_changes_nothing():
    torch.manual_seed(0)
    g = gate()
    torch.nn.init.normal_(g.weight)
    x = torch.randn(64, 16)
    choice, weight = g(x)
    g.e_score_correction_bias += 0.75
    again, same = g(x)
    assert torch.equal(choice.sort().values, again.sort().values)
    assert torch.allclose(weight.sort().values, same.sort().values)


def test_the_bias_selects_and_never_weighs():
    torch.manual_seed(0)
    g = gate()
    torch.nn.init.normal_(g.weight)
    g.e_score_correction_bias[7] = 100.0
    x = torch.randn(32, 16)
    choice, weight = g(x)
    assert bool((choice == 7).any(dim=1).all())
    s = torch.sigmoid(x @ g.weight.t()).gather(1, choice)
    assert torch.allclose(weight, 2.5 * s / s.sum(dim=1, keepdim=True))


def test_no_token_reaches_more_than_four_groups():
    torch.manual_seed(0)
    g = gate()
    torch.nn.init.normal_(g.weight)
    choice, _ = g(torch.randn(500, 16))
    groups = torch.zeros(500, 8).scatter(1, choice // 32, 1.0).sum(dim=1)
    assert float(groups.max()) <= 4


def choice_with_zeros(g, scores):
    """The choice where other groups' biased scores become zero instead of minus infinity."""
    biased = scores + g.e_score_correction_bias
    groups = biased.unflatten(1, (8, 32)).topk(2, dim=-1).values.sum(-1).topk(4, dim=-1).indices
    kept = torch.zeros(len(scores), 8, dtype=torch.bool).scatter_(1, groups, True).repeat_interleave(32, dim=1)
    return biased.masked_fill(~kept, 0.0).topk(8, dim=-1).indices.sort().values


def test_zero_masking_agrees_while_biased_scores_are_positive_and_only_then():
    torch.manual_seed(0)
    g = gate()
    scores = torch.rand(50, 256) * 0.5 + 0.25
    assert torch.equal(g.choose(scores).sort().values, choice_with_zeros(g, scores))
    g.e_score_correction_bias -= 2.0  # every biased score is negative: a masked zero would win
    ours = g.choose(scores).sort().values
    assert not torch.equal(ours, choice_with_zeros(g, scores))
    g.e_score_correction_bias.zero_()
    assert torch.equal(ours, g.choose(scores).sort().values)


def test_the_bias_moves_by_its_rate_against_the_load_whatever_the_loads_scale():
    load = torch.tensor([0, 10, 20, 30, 40])
    steps = []
    for scale in (1, 7, 10**9):
        bias = torch.zeros(5)
        update_bias(bias, load * scale, 1e-3)
        steps.append(bias)
    want = torch.tensor([1e-3, 1e-3, 0.0, -1e-3, -1e-3])
    assert all(torch.equal(bias, want) for bias in steps)


def test_equal_loads_leave_the_bias_alone():
    bias = torch.arange(256, dtype=torch.float32)
    update_bias(bias, torch.full((256,), 12_345), 1e-3)
    assert torch.equal(bias, torch.arange(256, dtype=torch.float32))
