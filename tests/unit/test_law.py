"""The law on one process: however a global batch is cut into micro-batches, the step is the same.

Bound 1e-12, relative, in float64: sums are taken in another order, nothing else differs.
"""

from __future__ import annotations

import pytest
import torch

from moetrain.accumulate import Balance, Window, held
from moetrain.parallel.recompute import recompute_in_backward, recompute_what_is_cheap
from tests.support.small import (
    FAMILIES,
    V3,
    difference,
    every_loss,
    global_batch,
    model,
    same_report,
    sgd,
    state,
    window,
)

CUTS = {"pairs": [2, 2, 2], "unequal": [1, 5], "singles, some empty": [1, 1, 0, 1, 1, 0, 1, 1]}
EXACT = ("sequence", "previous", "window")


def run(config, scope, sizes, *, recompute=False, in_place=False, steps=3, **kwargs):
    m = model(config)
    m.set_in_place_gradients(in_place)
    if recompute:
        for block in [*m.layers, *(k.block for k in m.mtp)]:
            recompute_what_is_cheap(block) if recompute == "selective" else recompute_in_backward(block)
    accumulator = sgd(m, config, every_loss(config, scope), **kwargs)
    reports = [accumulator.step(window(sizes)) for _ in range(steps)]
    return reports, state(m)


@pytest.fixture(scope="module", params=[(f, s) for f in FAMILIES for s in EXACT], ids=lambda p: f"{p[0]}-{p[1]}")
def big_batch(request):
    family, scope = request.param
    return FAMILIES[family], scope, *run(FAMILIES[family], scope, [6])


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("recompute", [False, True, "selective"])
def test_micro_batches_change_nothing(big_batch, cut, recompute, in_place):
    config, scope, reports, parameters = big_batch
    got, cut_parameters = run(config, scope, CUTS[cut], recompute=recompute, in_place=in_place)
    for a, b in zip(got, reports, strict=True):
        same_report(a, b, 1e-12)
    assert difference(cut_parameters, parameters) < 1e-12


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_counting_pass_gives_the_window_scope_too(family, recompute, cut):
    config = FAMILIES[family]
    reports, parameters = run(config, "window", [6])
    got, cut_parameters = run(config, "window", CUTS[cut], recompute=recompute, window_order="counting_pass")
    for a, b in zip(got, reports, strict=True):
        same_report(a, b, 1e-12)
    assert difference(cut_parameters, parameters) < 1e-12


@pytest.mark.parametrize("recompute", [False, True])
def test_activations_that_wait_in_host_memory_come_back_as_they_were(recompute, monkeypatch):
    want, parameters = run(V3, "window", [2, 4], recompute=recompute)
    monkeypatch.setattr(held, "SMALLEST", 1)  # also those of a tiny model
    monkeypatch.setattr(held.HostMemory, "holding", lambda self, device: self.hooks())  # also on a CPU
    monkeypatch.setattr(held.HostMemory, "_pack", counted(moved := [], held.HostMemory._pack))
    got, held_parameters = run(V3, "window", [2, 4], recompute=recompute, offload_activations=True)
    assert difference(held_parameters, parameters) == 0.0 and float(got[-1].total) == float(want[-1].total)
    # with recompute blocks keep their inputs alone (and positions and the like), without it all that autograd saves
    inputs = sum(rows_ * 12 * V3.hidden_size * 8 for rows_ in (2, 4)) * (V3.num_hidden_layers + 1)
    assert inputs * 3 <= sum(moved) and (not recompute or sum(moved) < 4 * inputs * 3)


def counted(moved, pack):
    def packed(self, x):
        before = self.moved
        out = pack(self, x)
        moved.append(self.moved - before)
        return out

    return packed


@pytest.mark.parametrize("scope", ["micro_batch", "running"])
def test_approximate_scopes_equal_the_big_batch_where_there_is_one_micro_batch(scope):
    _, exact = run(V3, "window", [6])
    _, approximate = run(V3, scope, [6])
    assert difference(approximate, exact) < 1e-12


@pytest.mark.parametrize("scope", ["micro_batch", "running"])
def test_approximate_scopes_are_approximate(scope):
    """What the docs call inexact is: this test fails if it is ever exact and the docs are out of date."""
    _, exact = run(V3, "window", [6])
    _, approximate = run(V3, scope, [2, 2, 2])
    assert difference(approximate, exact) > 1e-6


@pytest.mark.parametrize("scope", EXACT)
def test_a_starved_expert_and_one_that_takes_all(scope):
    """Routing forced by the correction bias: expert 0 gets every token, most experts none."""

    def forced(sizes):
        m = model()
        for name, bias in m.named_buffers():
            if name.endswith("e_score_correction_bias"):
                bias[0], bias[1] = 10.0, 5.0
        accumulator = sgd(m, V3, every_loss(V3, scope, bias_rate=0.0))
        reports = [accumulator.step(window(sizes)) for _ in range(2)]
        return reports, state(m), m

    reports, parameters, _ = forced([6])
    got, cut_parameters, _ = forced([2, 1, 3])
    load = got[-1].load
    # MTP routes the positions that have a next token of their own document; every one of them reaches expert 0
    assert (load[:, 0] * V3.num_experts_per_tok == load.sum(dim=1)).all() and (load[:, 2:] == 0).all(dim=1).any()
    for a, b in zip(got, reports, strict=True):
        same_report(a, b, 1e-12)
    assert difference(cut_parameters, parameters) < 1e-12


def test_every_expert_has_a_gradient_even_if_no_token_reached_it():
    m = model()
    for name, bias in m.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias[:2] = 10.0
    kept = {}
    accumulator = sgd(m, V3, Balance())
    accumulator.owner.step = lambda: kept.update({n: p.grad.clone() for n, p in m.named_parameters()})
    accumulator.step(window([2, 4]))
    assert kept.keys() == dict(m.named_parameters()).keys()
    starved = kept["layers.1.mlp.experts.down_proj"][2:]
    assert (starved == 0).all() and (kept["layers.1.mlp.experts.down_proj"][:2] != 0).any()


def test_a_window_without_a_single_label_gives_zero_loss_and_zero_gradients():
    batch = global_batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    m = model()
    before = state(m)
    report = sgd(m, V3, Balance()).step(Window([batch]))
    assert report.skipped is None and float(report.total) == 0.0 and float(report.grad_norm) == 0.0
    assert difference(state(m), before) == 0.0


def test_the_reported_loss_is_the_one_that_is_optimised():
    """Mean over all valid tokens of the global batch, computed from logits by the textbook."""
    batch = global_batch()
    m = model()
    report = sgd(m, V3, Balance(), max_norm=None).step(window([1, 2, 3]))
    m = model()
    documents = batch["document_ids"]
    logits = m(batch["input_ids"], document_ids=documents)
    targets = batch["labels"][:, 1:].masked_fill(documents[:, 1:] != documents[:, :-1], -100)
    want = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100)
    assert abs(float(report.losses["lm"] - want.detach())) < 1e-12
    assert float(report.valid_tokens) == float((targets != -100).sum())
