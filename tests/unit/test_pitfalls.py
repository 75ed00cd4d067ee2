"""The known faults of others, one test each (A loss, B balance, C routing bias, D group limits).

Numbers are those of the project's list of public bug reports. Where a fault shows on several ranks only, its test is in
tests/dist/test_pitfalls_on_ranks.py.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from moetrain import from_pretrained, save_pretrained
from moetrain.accumulate import Balance, MoEAccumulator, Window, count_denominators, update_bias, windows
from moetrain.accumulate.ledger import RoutingLedger, find_routers
from moetrain.loop import evaluate
from moetrain.model import DeepSeekLoss
from moetrain.model.gate import NoAuxTcGate
from moetrain.parallel.ranks import Ranks
from tests.support.small import LITE, V2, V3, difference, every_loss, global_batch, model, rows, sgd, state, window

PLAIN = V3.model_copy(update={"num_nextn_predict_layers": 0})


def textbook(m, batch):
    """Mean cross-entropy over every valid token of the whole batch."""
    documents = batch["document_ids"]
    logits = m(batch["input_ids"], document_ids=documents)
    targets = batch["labels"][:, 1:].masked_fill(documents[:, 1:] != documents[:, :-1], -100)
    targets = targets.masked_fill(batch["attention_mask"][:, :-1] == 0, -100)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), ignore_index=-100)


def gradients(accumulator, w):
    kept = {}
    m = accumulator.model
    accumulator.owner.step = lambda: kept.update({n: p.grad.clone() for n, p in m.named_parameters()})
    return accumulator.step(w), kept


def biases(m):
    return {name: b.clone() for name, b in m.named_buffers() if name.endswith("correction_bias")}


# -- A. loss normalisation --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[6], [1, 5], [1] * 6])
def test_A1_A2_the_gradient_is_that_of_one_mean_over_all_tokens_divided_once(sizes):
    """Rows have 2 to 11 valid tokens: a mean of means, or a division by the number of micro-batches, is far off."""
    m = model(PLAIN)
    textbook(m, global_batch()).backward()
    want = {n: p.grad.clone() for n, p in m.named_parameters() if p.grad is not None}
    _, got = gradients(sgd(m, PLAIN, Balance(), max_norm=None), window(sizes))
    assert all(float((got[n] - w).norm()) < 1e-12 * max(float(w.norm()), 1e-3) for n, w in want.items())


def test_A3_tokens_of_a_discarded_window_count_nowhere():
    class Spoilt(DeepSeekLoss):
        def __call__(self, module, micro_batch):
            return super().__call__(module, micro_batch) * (float("nan") if micro_batch.slot == 1 else 1.0)

    m, other = model(), model()
    accumulator = sgd(m, V3, every_loss(V3, "previous"))
    accumulator.loss = Spoilt(V3)
    report = accumulator.step(window([2, 2, 2]))
    # the whole window is gone: nothing of its first and third micro-batch was learnt either
    assert report.skipped is not None and difference(state(m), state(other)) == 0.0
    accumulator.loss = DeepSeekLoss(V3)
    a, b = accumulator.step(window([2, 4])), sgd(other, V3, every_loss(V3, "previous")).step(window([2, 4]))
    assert a.valid_tokens == b.valid_tokens and difference(state(m), state(other)) == 0.0


def test_A4_every_term_has_its_own_denominator():
    batch = global_batch()
    counts = count_denominators(Window([batch]), depths=1)
    assert counts.valid[0] != counts.valid[1]
    report = sgd(model(), V3, Balance()).step(window([1, 2, 3]))
    sums = DeepSeekLoss(V3)(model(), Window([batch])[0]).detach()
    for term, total, valid in zip(("lm", "mtp_1"), sums, counts.valid, strict=True):
        assert float(report.losses[term]) == pytest.approx(float(total / valid), rel=1e-12)


def test_A5_a_micro_batch_without_a_label_adds_zero_and_not_nan():
    empty = rows(1, 2)
    assert bool((empty["labels"] == -100).all())
    report = sgd(model(), V3, Balance()).step(Window([empty]))
    assert float(report.total) == 0.0 and float(report.grad_norm) == 0.0 and report.skipped is None


def test_A6_a_last_shorter_window_is_an_exact_step_and_one_step_of_the_schedule():
    class Schedule:
        steps = 0

        def step(self):
            self.steps += 1

    schedule = Schedule()
    m = model()
    accumulator = sgd(m, V3, Balance(), scheduler=schedule)
    for w in windows([rows(i, i + 1) for i in range(6)], micro_batches=4):
        last = accumulator.step(w)
    assert schedule.steps == 2
    other = model()
    accumulator = sgd(other, V3, Balance())
    accumulator.step(Window([rows(0, 4)]))
    want = accumulator.step(Window([rows(4, 6)]))
    assert float(last.total) == pytest.approx(float(want.total), rel=1e-12)
    assert difference(state(m), state(other)) < 1e-12


def test_A7_the_reported_loss_is_not_that_of_the_last_micro_batch():
    m = model(PLAIN)
    want = float(textbook(m, global_batch()).detach())
    assert float(sgd(m, PLAIN, Balance()).step(window([1] * 6)).losses["lm"]) == pytest.approx(want, rel=1e-12)


# -- B. balance losses ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["sequence", "window"])
def test_B1_value_and_gradient_do_not_depend_on_the_number_of_micro_batches(scope):
    runs = [gradients(sgd(model(), V3, every_loss(V3, scope)), window(sizes)) for sizes in ([6], [2, 4], [1] * 6)]
    for report, got in runs[1:]:
        assert float(report.losses["balance"]) == pytest.approx(float(runs[0][0].losses["balance"]), rel=1e-12)
        assert float(report.losses["z"]) == pytest.approx(float(runs[0][0].losses["z"]), rel=1e-12)
        assert difference(got, runs[0][1]) < 1e-12


@pytest.mark.parametrize("config", [LITE, V2, V3], ids=["V2-Lite", "V2", "V3"])
def test_B2_the_whole_gradient_is_the_slope_of_the_reported_total(config):
    """Central differences of the reported total along a random direction; no choice flips under so small a step.

    With counts frozen the total is differentiable; ``window`` reports and optimises the same number.
    """
    balance = every_loss(config, "window", bias_rate=0.0)
    m = model(config)
    report, got = gradients(sgd(m, config, balance, max_norm=None), window([2, 4]))
    g = torch.Generator().manual_seed(5)
    direction = {n: torch.randn(p.shape, generator=g, dtype=torch.float64) for n, p in m.named_parameters()}
    h = 1e-6

    def total(sign):
        moved = model(config)
        with torch.no_grad():
            for n, p in moved.named_parameters():
                p.add_(direction[n], alpha=sign * h)
        accumulator = sgd(moved, config, balance, max_norm=None)
        accumulator.owner.step = lambda: None
        out = accumulator.step(window([2, 4]))
        assert torch.equal(out.load, report.load)
        return float(out.total)

    slope = sum(float((got[n] * d).sum()) for n, d in direction.items())
    assert (total(1) - total(-1)) / (2 * h) == pytest.approx(slope, rel=1e-6)  # h^2 and rounding over h


def test_B4_running_counts_travel_with_their_tokens():
    """f is a share: with equal routing everywhere, the running f of every slot is the same f."""
    m = model()
    accumulator = sgd(m, V3, Balance(scope="running", alpha=1.0))
    accumulator.step(Window([rows(0, 1)] * 3))
    c = accumulator.ledger.coefficients
    assert torch.allclose(c[0], c[1], rtol=1e-12) and torch.allclose(c[0], c[2], rtol=1e-12) and bool((c > 0).any())


def test_B5_C2_recompute_counts_nothing_twice():
    from moetrain.parallel.recompute import recompute_in_backward

    plain, again = model(), model()
    for block in [*again.layers, *(k.block for k in again.mtp)]:
        recompute_in_backward(block)
    a, b = (sgd(m, V3, every_loss(V3, "window")).step(window([2, 4])) for m in (plain, again))
    assert torch.equal(a.load, b.load) and a.losses["balance"] == b.losses["balance"]
    assert difference(biases(plain), biases(again)) == 0.0


def test_B6_padding_is_in_no_statistic():
    batch = {k: v[:, :8] for k, v in rows(0, 3).items()}
    wide = {k: F.pad(v, (0, 4), value=-100 if k == "labels" else 0) for k, v in batch.items()}
    assert bool((wide["attention_mask"][:, 8:] == 0).all())
    a, b = (sgd(model(), V3, every_loss(V3, "sequence")).step(Window([x])) for x in (batch, wide))
    assert torch.equal(a.load, b.load)
    for term in a.losses:
        assert float(a.losses[term]) == pytest.approx(float(b.losses[term]), rel=1e-12), term


def test_B7_the_sequence_loss_sees_imbalance():
    def value(collapsed):
        m = model(LITE)
        if collapsed:
            for layer in m.layers[1:]:
                with torch.no_grad():
                    layer.mlp.gate.weight[2:].zero_()
                    layer.mlp.gate.weight[:2] *= 20
        return float(sgd(m, LITE, Balance(scope="sequence", alpha=1.0)).step(window([2, 4])).losses["balance"])

    assert value(True) > 1.2 * value(False) > 1.2 * 2 * 0.9  # two layers, each at least about 1


def test_B8_evaluation_leaves_no_trace():
    m, other = model(), model()
    for x, evaluates in ((m, True), (other, False)):
        accumulator = sgd(x, V3, every_loss(V3, "previous"))
        for _ in range(2):
            accumulator.step(window([2, 4]))
            if evaluates:
                x(global_batch()["input_ids"]).sum()
                alone = Ranks(0, 1, torch.device("cpu"), None)
                assert evaluate(accumulator, accumulator.loss, [window([6])], alone)["eval_tokens"] > 0
                assert x.training
    assert difference(state(m), state(other)) == 0.0


def test_B9_slots_may_run_in_any_order():
    """Forwards 2, 0, 1 and backwards 1, 2, 0, as an interleaved schedule might: the same gradients."""
    want = gradients(sgd(model(), V3, every_loss(V3, "window"), max_norm=None), window([2, 2, 2]))[1]
    m = model()
    w, loss, balance = window([2, 2, 2]), DeepSeekLoss(V3), every_loss(V3, "window")
    ledger = RoutingLedger(find_routers(m), balance)
    counts = count_denominators(w, depths=1)
    ledger.begin(w, counts, torch.float64, torch.device("cpu"))
    scale = torch.tensor(loss.weights, dtype=torch.float64) / counts.valid
    held = {}
    with ledger.attached():
        for slot in (2, 0, 1):
            ledger.slot = slot
            held[slot] = (loss(m, w[slot]) * scale).sum()
        ledger.forwards_done()
        for slot in (1, 2, 0):
            with ledger.backward_of(slot):
                held[slot].backward()
    assert difference({n: p.grad for n, p in m.named_parameters()}, want) < 1e-12


# -- C. routing bias --------------------------------------------------------------------------------------------------


def test_C1_the_bias_moves_once_per_step_however_many_micro_batches():
    m = model()
    sgd(m, V3, Balance(bias_rate=1e-3)).step(window([1] * 6))
    for b in biases(m).values():
        assert float(b.abs().max()) == pytest.approx(1e-3)


def test_C3_a_layer_without_a_bias_stops_no_other():
    m = model()
    del m.layers[1].mlp.gate.e_score_correction_bias
    m.layers[1].mlp.gate.choose = lambda scores: scores.topk(2, dim=-1).indices
    sgd(m, V3, Balance(bias_rate=1e-3)).step(window([6]))
    moved = biases(m)
    assert len(moved) == 2 and all(bool((b != 0).any()) for b in moved.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_C5_the_bias_is_fp32_after_every_cast_and_small_steps_add_up(dtype):
    m = model().to(dtype).float().to(dtype)
    (b, *_) = biases(m).values()
    assert b.dtype == torch.float32
    for _ in range(5000):
        update_bias(b, torch.tensor([1, 3] * 4), 1e-3)
    assert float(b[0]) == pytest.approx(5.0, rel=1e-4) and float(b[1]) == pytest.approx(-5.0, rel=1e-4)
    ledger = RoutingLedger(find_routers(m), Balance())
    w = window([6])
    ledger.begin(w, count_denominators(w, depths=1), torch.float32, torch.device("cpu"))
    assert not ledger.counts.is_floating_point()


def test_C6_the_bias_survives_export_and_import_bit_for_bit(tmp_path):
    m = model(dtype=torch.float32)
    for i, (_, b) in enumerate(m.named_buffers()):
        b.copy_(torch.randn(b.shape, generator=torch.Generator().manual_seed(i)) * 1e-3)
    save_pretrained(m, tmp_path, dtype=torch.bfloat16)
    again = biases(from_pretrained(tmp_path, dtype=torch.bfloat16, device="cpu"))
    assert again.keys() == biases(m).keys() and all(torch.equal(again[n], b) for n, b in biases(m).items())


def test_C7_the_bias_selects_and_weighs_nothing():
    m, shifted = model(), model()
    for _, b in shifted.named_buffers():
        if b.dtype == torch.float32 and b.numel() == V3.n_routed_experts:
            b += 0.37  # all alike: no other choice
    ids = global_batch()["input_ids"]
    assert torch.equal(m(ids), shifted(ids))


def test_C8_a_skipped_step_moves_no_bias():
    m = model()
    accumulator = sgd(m, V3, every_loss(V3, "previous"), skip_if=lambda norm: "too steep")
    accumulator.step(window([2, 4]))
    assert all(bool((b == 0).all()) for b in biases(m).values()) and accumulator.ledger.previous is None


def test_C9_the_router_of_multi_token_prediction_has_its_bias_moved():
    m = model()
    sgd(m, V3, Balance(bias_rate=1e-3)).step(window([2, 4]))
    assert bool((biases(m)["mtp.0.block.mlp.gate.e_score_correction_bias"] != 0).any())


# -- D. group-limited selection ---------------------------------------------------------------------------------------


def test_D1_a_masked_expert_never_wins_where_biased_scores_are_negative():
    gate = NoAuxTcGate(V3)
    gate.e_score_correction_bias.fill_(-5.0)
    scores = torch.rand(200, V3.n_routed_experts, generator=torch.Generator().manual_seed(0))
    choice = gate.choose(scores)
    group_of = choice // (V3.n_routed_experts // V3.n_group)
    best = (scores - 5.0).unflatten(1, (V3.n_group, -1)).topk(2).values.sum(-1).topk(V3.topk_group).indices
    assert bool((group_of.unsqueeze(2) == best.unsqueeze(1)).any(dim=2).all())
    gate.e_score_correction_bias.zero_()
    assert torch.equal(choice.sort().values, gate.choose(scores).sort().values)


def test_the_library_loss_warns_where_multi_token_prediction_would_not_be_trained():
    m = model()
    with pytest.warns(UserWarning, match="modules are not trained"):
        MoEAccumulator(m, torch.optim.SGD(m.parameters(), lr=0.1))
