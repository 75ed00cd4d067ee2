"""Logits and every gradient against transformers' DeepSeek-V2 and V3, on random small configs.

transformers computes rotary angles, norms and the router in fp32 whatever the model's dtype, so float64 agrees to fp32
rounding too: 5e-6 relative is some twenty roundings of 2^-23 through three layers, and a wrong formula is off by 1e-2.
"""

from __future__ import annotations

import pytest
import torch

from moetrain.model.gate import GroupLimitedGate, NoAuxTcGate
from tests.support.twins import as_theirs, ours_from, random_config, relative, theirs_from, twins

pytest.importorskip("transformers")

BOUND = 5e-6
TOKENS = 47


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "float64"])
def test_logits_and_every_gradient(family, seed, dtype):
    ours, theirs = twins(family, seed, dtype)
    ids = torch.randint(0, ours.config.vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(seed))
    a, b = ours(ids), theirs(input_ids=ids).logits
    assert a.dtype == dtype and relative(a, b) < BOUND
    weight = torch.randn(a.shape, generator=torch.Generator().manual_seed(1), dtype=dtype)
    a.backward(weight)
    b.backward(weight)
    wanted = {name: p.grad for name, p in theirs.named_parameters()}
    got = as_theirs({name: p.grad for name, p in ours.named_parameters()})
    assert got.keys() == wanted.keys()
    # a softmax or sigmoid gradient is a difference of near-equal numbers: measured against the largest gradient too
    largest = max(float(g.norm()) for g in wanted.values())
    for name, g in wanted.items():
        error = float((got[name].double() - g.double()).norm())
        assert error < 2 * BOUND * float(g.norm()) + 1e-7 * largest, name


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_positions_far_from_zero(family):
    """3000 and on, at four frequencies that YaRN keeps, bends and divides."""
    ours, theirs = twins(family, 1, torch.float32, qk_rope_head_dim=8)
    ids = torch.randint(0, ours.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(TOKENS).unsqueeze(0) + 3000
    assert relative(ours(ids, position_ids=positions), theirs(input_ids=ids, position_ids=positions).logits) < BOUND


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_packed_documents_are_what_each_is_alone(family):
    """Three documents in a row, positions that start again, against transformers on each of them."""
    ours, theirs = twins(family, 1, torch.float32)
    ids = torch.randint(0, ours.config.vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    lengths = (20, 1, 26)
    positions = torch.cat([torch.arange(n) for n in lengths]).unsqueeze(0)
    documents = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).unsqueeze(0)
    packed = ours(ids, position_ids=positions, document_ids=documents).split(lengths, dim=1)
    for mine, alone in zip(packed, ids.split(lengths, dim=1), strict=True):
        assert relative(mine, theirs(input_ids=alone).logits) < BOUND


@pytest.mark.parametrize(("mscale", "all_dim"), [(1.0, 0.707), (0.707, 1.0), (0.5, 0.25)])
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
def test_two_different_mscales(family, mscale, all_dim):
    """cos and sin carry the ratio, the softmax scale the square of the second; no released model has them apart."""
    yarn = {"type": "yarn", "factor": 40.0, "original_max_position_embeddings": 32, "beta_fast": 32, "beta_slow": 1}
    yarn |= {"mscale": mscale, "mscale_all_dim": all_dim}
    ours, theirs = twins(family, 3, torch.float32, rope_scaling=yarn)
    ids = torch.randint(0, ours.config.vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    assert relative(ours(ids), theirs(input_ids=ids).logits) < BOUND


def test_transformers_ignores_norm_topk_prob_of_v2_and_the_released_code_does_not():
    """Facts H.9: with ``norm_topk_prob`` the released V2 code normalises over the chosen and does not scale."""
    config = {**random_config("deepseek_v2", 0), "norm_topk_prob": True, "routed_scaling_factor": 16.0}
    config |= {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "num_experts_per_tok": 2}
    gate = ours_from(config).layers[-1].mlp.gate
    torch.nn.init.normal_(gate.weight)
    x = torch.randn(9, config["hidden_size"])
    _, weight = gate(x)
    assert torch.allclose(weight.sum(-1), torch.ones(9))
    theirs = theirs_from(config).model.layers[-1].mlp.gate
    theirs.weight.data.copy_(gate.weight)
    _, their_weight, _ = theirs(x)
    assert not torch.allclose(their_weight.sum(-1), torch.ones(9))


def test_negative_biased_scores_of_other_groups_never_win():
    """Facts H.1: masked groups get minus infinity. With zeros, every expert outside would win."""
    config = {**random_config("deepseek_v3", 0), "n_routed_experts": 8, "n_group": 4, "topk_group": 1}
    gate = ours_from({**config, "num_experts_per_tok": 2}).layers[-1].mlp.gate
    assert isinstance(gate, NoAuxTcGate)
    gate.e_score_correction_bias.fill_(-2.0)
    torch.nn.init.normal_(gate.weight)
    choice, _ = gate(torch.randn(64, config["hidden_size"]))
    assert bool((choice // 2 == choice[:, :1] // 2).all())


def test_v2_takes_a_groups_best_expert_not_its_best_two():
    """Facts C.3: two good experts in one group lose against the single best expert of another."""
    config = {**random_config("deepseek_v2", 0), "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
    config |= {"topk_method": "group_limited_greedy", "num_experts_per_tok": 1}
    gate = ours_from(config).layers[-1].mlp.gate
    assert isinstance(gate, GroupLimitedGate)
    assert gate.choose(torch.tensor([[0.4, 0.0, 0.3, 0.3]])).tolist() == [[0]]
