"""What a step promises beside its numbers: skips lose nothing, recompute counts once, evaluation leaves no trace."""

from __future__ import annotations

import copy

import pytest
import torch

from moetrain.accumulate import Balance, MoEAccumulator, Window, causal_lm_loss, windows
from moetrain.model import DeepSeekLoss
from moetrain.parallel.recompute import recompute_in_backward
from tests.support.small import V3, difference, every_loss, global_batch, model, rows, sgd, state, window


class Spoilt(DeepSeekLoss):
    """The real loss, times NaN at one slot."""

    def __init__(self, config, slot):
        super().__init__(config)
        self.slot = slot

    def __call__(self, m, micro_batch):
        return super().__call__(m, micro_batch) * (float("nan") if micro_batch.slot == self.slot else 1.0)


class Counter:
    steps = 0

    def step(self):
        self.steps += 1


@pytest.mark.parametrize("scope", ["sequence", "previous", "window"])
def test_a_discarded_window_leaves_every_state_as_it_was(scope):
    m = model()
    optimizer = torch.optim.AdamW(m.parameters(), lr=1e-2)
    schedule = Counter()
    accumulator = MoEAccumulator(
        m, optimizer, loss=DeepSeekLoss(V3), balance=every_loss(V3, scope), scheduler=schedule, max_norm=1.0
    )
    accumulator.step(window([3, 3]))
    before, moments, routing = state(m), copy.deepcopy(optimizer.state_dict()), accumulator.state_dict()
    routing = copy.deepcopy(routing)
    accumulator.loss = Spoilt(V3, slot=1)
    report = accumulator.step(window([3, 3]))
    assert report.skipped is not None and "nan" in report.skipped
    assert difference(state(m), before) == 0.0 and schedule.steps == 1
    for key, entry in optimizer.state_dict()["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, moments["state"][key][name])
    for name, value in accumulator.state_dict()["routing"].items():
        assert torch.equal(value, routing["routing"][name])
    assert all(p.grad is None for p in m.parameters())
    accumulator.loss = DeepSeekLoss(V3)
    assert accumulator.step(window([3, 3])).skipped is None and schedule.steps == 2


def test_a_guard_discards_the_window_with_its_reason():
    m = model()
    before = state(m)
    report = sgd(m, V3, Balance(), skip_if=lambda norm: f"norm {norm:.1f} > 0" if norm > 0 else None).step(window([6]))
    assert report.skipped is not None and report.skipped.startswith("norm")
    assert difference(state(m), before) == 0.0


def test_recompute_counts_every_token_once():
    plain, again = model(), model()
    for block in [*again.layers, *(k.block for k in again.mtp)]:
        recompute_in_backward(block)
    loads = [sgd(m, V3, every_loss(V3, "sequence")).step(window([2, 4])).load for m in (plain, again)]
    assert torch.equal(*loads)
    assert int(loads[0][0].sum()) == V3.num_experts_per_tok * int(global_batch()["attention_mask"].sum())


def test_recompute_routes_as_the_first_forward_did_even_if_the_bias_moved_between():
    """A choice is replayed, not made again: here the bias is changed while the backward has not run yet."""
    m = model()
    for block in [*m.layers, *(k.block for k in m.mtp)]:
        recompute_in_backward(block)

    class Meddling(DeepSeekLoss):
        def __call__(self, module, micro_batch):
            out = super().__call__(module, micro_batch)
            for name, bias in module.named_buffers():
                if name.endswith("correction_bias"):
                    bias.copy_(torch.randn(bias.shape, generator=torch.Generator().manual_seed(micro_batch.slot)))
            return out

    def gradients(recomputed):
        m = model()
        if recomputed:
            for block in [*m.layers, *(k.block for k in m.mtp)]:
                recompute_in_backward(block)
        kept = {}
        accumulator = MoEAccumulator(m, torch.optim.SGD(m.parameters(), lr=1.0), loss=Meddling(V3))
        accumulator.owner.step = lambda: kept.update({n: p.grad.clone() for n, p in m.named_parameters()})
        accumulator.step(window([3, 3]))
        return kept

    assert difference(gradients(True), gradients(False)) < 1e-12


def test_evaluation_between_steps_changes_nothing():
    def train(evaluate):
        m = model()
        accumulator = sgd(m, V3, every_loss(V3, "previous"))
        for _ in range(3):
            accumulator.step(window([2, 4]))
            if evaluate:
                with torch.no_grad():
                    m(global_batch()["input_ids"])
                m(global_batch()["input_ids"]).sum()  # even with a graph
        return state(m)

    assert difference(train(True), train(False)) == 0.0


def test_padding_is_not_counted():
    report = sgd(model(), V3, Balance()).step(window([6]))
    assert int(report.load[0].sum()) == V3.num_experts_per_tok * int(global_batch()["attention_mask"].sum())
    assert float(report.routed_tokens) == float(global_batch()["attention_mask"].sum())


def test_a_last_shorter_window_is_not_lost():
    got = list(windows([rows(i, i + 1) for i in range(5)], 2))
    assert [len(w) for w in got] == [2, 2, 1]
    assert [item.slot for item in got[1]] == [0, 1]


def test_every_router_is_balanced_also_that_of_multi_token_prediction():
    m = model()
    accumulator = sgd(m, V3, every_loss(V3, "sequence"))
    report = accumulator.step(window([6]))
    assert report.load.shape == (3, V3.n_routed_experts)
    moved = [b for name, b in m.named_buffers() if name.endswith("correction_bias") and bool((b != 0).any())]
    assert len(moved) == 3
    assert report.max_violation.shape == (3,) and bool((report.max_violation >= 0).all())


def test_max_norm_clips_the_global_norm():
    m = model()
    kept = {}
    accumulator = sgd(m, V3, Balance(), max_norm=0.01)
    accumulator.owner.step = lambda: kept.update(norm=torch.nn.utils.get_total_norm([p.grad for p in m.parameters()]))
    report = accumulator.step(window([2, 4]))
    assert float(report.grad_norm) > 0.01
    assert abs(float(kept["norm"]) - 0.01) < 1e-6  # torch's rule: norm + 1e-6 in the divisor


def test_any_model_that_gives_logits_trains_with_the_causal_loss():
    m = model()
    accumulator = MoEAccumulator(m, torch.optim.SGD(m.parameters(), lr=0.1), loss=causal_lm_loss)
    batch = {k: global_batch()[k] for k in ("input_ids", "labels")}
    first = accumulator.step(Window([batch]))
    for _ in range(5):
        last = accumulator.step(Window([batch]))
    assert float(last.total) < float(first.total)


@pytest.mark.parametrize(
    ("batch", "sentence"),
    [
        ([], "at least one micro-batch"),
        ([{"input_ids": torch.zeros(1, 4, dtype=torch.int64)}], "has no 'labels'"),
        ([{"input_ids": torch.zeros(4), "labels": torch.zeros(4)}], "must be \\[batch, tokens\\]"),
        ([{"input_ids": torch.zeros(1, 4), "labels": torch.zeros(1, 3)}], "not shifted"),
    ],
)
def test_a_bad_window_is_refused_in_words(batch, sentence):
    with pytest.raises(ValueError, match=sentence):
        Window(batch)


def test_wrong_settings_are_refused_in_words():
    m = model()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="scope must be one of"):
        Balance(scope="global")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="reduce must be"):
        MoEAccumulator(m, optimizer, reduce="never")
    with pytest.raises(ValueError, match="needs FSDP2"):
        MoEAccumulator(m, optimizer, reduce="micro_batch")
    with pytest.raises(ValueError, match="needs routers"):
        plain = torch.nn.Linear(2, 2)
        MoEAccumulator(plain, torch.optim.SGD(plain.parameters(), lr=0.1), balance=Balance(alpha=1.0))


def gradients_of(accumulator, m, w):
    kept = {}
    accumulator.owner.step = lambda: kept.update({n: p.grad.clone() for n, p in m.named_parameters()})
    accumulator.step(w)
    return kept


def test_an_exception_in_the_middle_of_a_window_leaves_nothing_to_the_next():
    class Failing(DeepSeekLoss):
        def __call__(self, module, micro_batch):
            if micro_batch.slot == 1:
                raise RuntimeError("out of memory")
            return super().__call__(module, micro_batch)

    m = model()
    accumulator = sgd(m, V3, every_loss(V3, "sequence"), max_norm=None)
    accumulator.loss = Failing(V3)
    with pytest.raises(RuntimeError, match="out of memory"):
        accumulator.step(window([3, 3]))
    accumulator.loss = DeepSeekLoss(V3)
    other = model()
    want = gradients_of(sgd(other, V3, every_loss(V3, "sequence"), max_norm=None), other, window([3, 3]))
    assert difference(gradients_of(accumulator, m, window([3, 3])), want) == 0.0


def test_gradients_from_before_are_not_part_of_the_step():
    m, other = model(), model()
    for p in m.parameters():
        p.grad = torch.ones_like(p)
    got = gradients_of(sgd(m, V3, Balance(), max_norm=None), m, window([6]))
    assert difference(got, gradients_of(sgd(other, V3, Balance(), max_norm=None), other, window([6]))) == 0.0


def test_an_optimizer_of_a_part_of_the_parameters_has_the_same_norm_every_step():
    m = model()
    part = torch.optim.SGD(m.lm_head.parameters(), lr=0.0)
    accumulator = MoEAccumulator(m, part, loss=DeepSeekLoss(V3))
    norms = [float(accumulator.step(window([2, 4])).grad_norm) for _ in range(3)]
    assert norms[0] == norms[1] == norms[2]


def test_padding_before_a_row_is_worth_as_much_as_none():
    """The same rows, four places of padding in front and positions that start after it: the same step."""
    ids = global_batch()["input_ids"][:2]
    front = torch.zeros(2, 4, dtype=torch.int64)
    padded = {
        "input_ids": torch.cat([front, ids], dim=1),
        "labels": torch.cat([front - 100, ids], dim=1),
        "attention_mask": torch.cat([front, torch.ones_like(ids)], dim=1),
        "position_ids": torch.cat([front, torch.arange(ids.shape[1]).expand_as(ids)], dim=1),
    }
    reports = []
    for batch in ({"input_ids": ids, "labels": ids}, padded):
        reports.append(sgd(model(), V3, every_loss(V3, "sequence")).step(Window([batch])))
    assert torch.equal(reports[0].load, reports[1].load)
    assert reports[0].valid_tokens == reports[1].valid_tokens
    for term in reports[0].losses:
        assert float(reports[0].losses[term]) == pytest.approx(float(reports[1].losses[term]), rel=1e-12), term


@pytest.mark.parametrize("value", [-1.0, 0.0, float("nan"), float("inf")])
def test_a_norm_that_is_no_bound_is_refused(value):
    m = model()
    with pytest.raises(ValueError, match="max_norm must be a positive number"):
        MoEAccumulator(m, torch.optim.SGD(m.parameters(), lr=0.1), max_norm=value)


@pytest.mark.parametrize("name", ["alpha", "alpha_device", "alpha_communication", "z_loss", "bias_rate"])
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_weight_that_is_none_is_refused(name, value):
    with pytest.raises(ValueError, match=f"balance {name} must be"):
        Balance(**{name: value})


def test_what_is_no_window_or_no_tensor_or_empty_is_refused_in_words():
    m = model()
    batch = global_batch()
    with pytest.raises(ValueError, match="step takes a Window"):
        sgd(m, V3, Balance()).step([batch])
    with pytest.raises(ValueError, match="'name' is no tensor"):
        Window([{**batch, "name": ["a"]}])
    with pytest.raises(ValueError, match="leave it out, or give a row of padding"):
        Window([{key: value[:0] for key, value in batch.items()}])


@pytest.mark.parametrize("recompute", [False, True])
def test_given_routing_decisions_are_the_ones_that_are_used(recompute):
    """As a reinforcement-learning user gives them: the generator's choices, and the trainer's own weights for them."""
    w = window([2, 4])
    g = torch.Generator().manual_seed(0)
    chosen = [
        torch.stack([torch.stack([torch.randperm(8, generator=g)[:2] for _ in range(item.input_ids.numel())])] * 3)
        for item in w
    ]
    m = model()
    if recompute:
        for block in [*m.layers, *(k.block for k in m.mtp)]:
            recompute_in_backward(block)
    report = sgd(m, V3, every_loss(V3, "window")).step(w, routing=chosen)
    real = torch.cat([c[0][item.attention_mask.flatten() != 0] for c, item in zip(chosen, w, strict=True)])
    assert torch.equal(report.load[0], torch.bincount(real.flatten(), minlength=8))
    own = sgd(model(), V3, every_loss(V3, "window")).step(w)
    assert not torch.equal(report.load, own.load)
    with pytest.raises(ValueError, match="given for 1 micro-batches, and the window has 2"):
        sgd(model(), V3, Balance()).step(w, routing=chosen[:1])
    with pytest.raises(ValueError, match=r"must be \[3, 24, 2\], not \[2, 24, 2\]"):
        sgd(model(), V3, Balance()).step(w, routing=[c[:2] for c in chosen])


def test_the_routing_that_a_model_chose_itself_given_back_changes_nothing():
    class Recording(DeepSeekLoss):
        def __call__(self, module, micro_batch):
            out = super().__call__(module, micro_batch)
            rows = [accumulator.ledger._choices[micro_batch.slot, row] for row in range(3)]
            kept.append(torch.stack(rows))
            return out

    kept: list[torch.Tensor] = []
    m, other = model(), model()
    accumulator = sgd(m, V3, every_loss(V3, "sequence"))
    accumulator.loss = Recording(V3)
    accumulator.step(window([2, 4]))
    sgd(other, V3, every_loss(V3, "sequence")).step(window([2, 4]), routing=kept)
    assert difference(state(m), state(other)) == 0.0


def test_a_step_that_cannot_train_says_why():
    m = model()
    accumulator = sgd(m, V3, Balance())
    with torch.no_grad(), pytest.raises(ValueError, match=r"outside torch.no_grad\(\)"):
        accumulator.step(window([6]))
    m.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        accumulator.step(window([6]))
    batch = global_batch()
    with pytest.raises(ValueError, match="labels must be token ids, or -100"):
        Window([{**batch, "labels": batch["labels"].masked_fill(batch["labels"] == -100, -1)}])
    with pytest.raises(ValueError, match=r"input_ids must be token ids, torch\.int64"):
        Window([{**batch, "input_ids": batch["input_ids"].float()}])
    for size in (0, 2.5):
        with pytest.raises(ValueError, match="whole number from 1 on"):
            list(windows([batch], micro_batches=size))


@pytest.mark.parametrize("trained", ["lm_head", "experts", "gate.weight", "layernorm"])
@pytest.mark.parametrize("order", ["forwards_first", "counting_pass"])
def test_a_model_that_is_mostly_frozen_takes_the_same_step_however_it_is_cut(trained, order):
    def run(sizes):
        m = model()
        for name, p in m.named_parameters():
            p.requires_grad_(trained in name)
        optimizer = torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.5)
        balance = every_loss(V3, "window")
        accumulator = MoEAccumulator(
            m, optimizer, loss=DeepSeekLoss(V3), balance=balance, max_norm=1.0, window_order=order
        )
        for _ in range(2):
            accumulator.step(window(sizes))
        return state(m)

    assert difference(run([2, 1, 3]), run([6])) < 1e-12
