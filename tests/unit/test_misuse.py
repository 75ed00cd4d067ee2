"""What somebody's own loop may do wrong: a sentence before anything has moved, never a wrong number."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from moetrain.accumulate import Balance, MicroBatch, MoEAccumulator, Window, grad_norm
from moetrain.model import DeepSeekLoss
from tests.support.small import LITE, V3, difference, every_loss, global_batch, model, rows, sgd, state, window


def causes(match, m, **kwargs):
    before = state(m)
    defaults = {"optimizer": torch.optim.SGD(m.parameters(), lr=0.1), "loss": DeepSeekLoss(V3)}
    with pytest.raises(ValueError, match=match):
        MoEAccumulator(m, **{**defaults, **kwargs}).step(window([2, 4]))
    assert difference(state(m), before) == 0.0


def test_parameters_that_are_not_the_models_are_refused():
    """They would gather gradients from window to window, also over one that was discarded."""
    m, other = model(), torch.nn.Linear(2, 2)
    causes("not the model's", m, optimizer=torch.optim.SGD([*m.parameters(), *other.parameters()], lr=0.1))
    causes("not the model's", m, optimizer=torch.optim.SGD(model().parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"optimizer": None}, "must be a torch.optim.Optimizer"),
        ({"balance": 0.01}, "must be a moetrain.Balance"),
        ({"balance": {"alpha": 0.01}}, "must be a moetrain.Balance"),
        ({"routers": [1, 2]}, "must be a list of Router"),
        ({"routers": torch.nn.Linear(1, 1)}, "must be a list of Router"),
    ],
)
def test_a_part_of_the_wrong_kind_is_named(wrong, match):
    causes(match, model(), **wrong)


@pytest.mark.parametrize("alpha", ["1e-3", None, float("nan"), -1.0])
def test_a_weight_of_balance_is_a_number(alpha):
    with pytest.raises(ValueError, match="balance alpha must be a number from 0 on"):
        Balance(alpha=alpha)


def test_parts_that_accelerate_wrapped_are_refused_and_not_stepped_twice():
    accelerate = pytest.importorskip("accelerate")
    m = model()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    wrapped, prepared = accelerate.Accelerator(cpu=True).prepare(optimizer, scheduler)
    causes("accelerate_accumulator", m, optimizer=wrapped)
    causes("accelerate_accumulator", m, optimizer=optimizer, scheduler=prepared)


class Twice(DeepSeekLoss):
    def __call__(self, m, micro_batch):
        return (super().__call__(m, micro_batch) + super().__call__(m, micro_batch)) / 2


class Rows(DeepSeekLoss):
    def __call__(self, m, micro_batch):
        targets = torch.stack([micro_batch.targets(depth + 1) for depth in self.depths])
        return m(micro_batch.input_ids[:1], targets=targets[:, :1])


def test_a_loss_calls_the_model_once_and_with_all_rows():
    causes("ran twice", model(), loss=Twice(V3), balance=every_loss(V3, "window"))
    causes("ran twice", model(), loss=Twice(V3))
    causes("saw 12 tokens of micro-batch 0, which has 24", model(), loss=Rows(V3))


class Wrong(DeepSeekLoss):
    def __init__(self, result):
        super().__init__(V3)
        self.result = result

    def __call__(self, m, micro_batch):
        return self.result(super().__call__(m, micro_batch))


@pytest.mark.parametrize("result", [lambda x: x.sum(), lambda x: x[:1], float, lambda x: x[None], lambda x: {"lm": x}])
@pytest.mark.parametrize("scope", ["sequence", "window"])
def test_a_loss_gives_one_sum_for_each_term(result, scope):
    wrong = Wrong(result if result is not float else lambda x: float(x.detach().sum()))
    causes(r"a sum for each of its 2 terms, \[2\], not ", model(), loss=wrong, balance=every_loss(V3, scope))


def test_a_loss_without_a_graph_or_without_names_is_refused():
    causes("does not depend on any parameter", model(), loss=Wrong(lambda x: x.detach()))
    causes("names, depths and weights", model(), loss=torch.nn.CrossEntropyLoss())
    causes("names, depths and weights", model(), loss=lambda m, item: m(item.input_ids))


def test_optimizers_and_schedulers_that_want_more_than_a_step_are_refused():
    m = model()
    causes("LBFGS", m, optimizer=torch.optim.LBFGS(m.parameters()))
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    causes("ReduceLROnPlateau", m, optimizer=optimizer, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    causes("max_norm must be a positive number", m, max_norm="1")


@pytest.mark.parametrize("balance", [Balance(z_loss=0.1), Balance(bias_rate=0.1), Balance(alpha=0.1)])
def test_losses_and_rates_that_nothing_would_read_are_refused(balance):
    causes("needs routers|no router of the model has one", model(), routers=[], balance=balance)


def test_a_bias_rate_needs_a_bias():
    with pytest.raises(ValueError, match="no router of the model has one"):
        sgd(model(LITE), LITE, Balance(bias_rate=1e-3))


def test_a_bias_in_half_precision_is_refused_before_the_weights_move():
    m = model()
    gate = m.layers[1].mlp.gate
    gate._buffers["e_score_correction_bias"] = gate.e_score_correction_bias.bfloat16()
    causes("must be kept in fp32", m, balance=Balance(bias_rate=1e-3))


@pytest.mark.parametrize("verdict", [False, None, ""])
def test_a_guard_that_says_no_lets_the_step_through(verdict):
    report = sgd(model(), V3, Balance(), skip_if=lambda norm: verdict).step(window([6]))
    assert report.skipped is None


def test_a_guard_may_say_yes_without_a_reason():
    m = model()
    before = state(m)
    assert "skip_if" in sgd(m, V3, Balance(), skip_if=lambda norm: norm > 0).step(window([6])).skipped
    assert difference(state(m), before) == 0.0


def test_an_accumulator_is_neither_copied_nor_pickled():
    accumulator = sgd(model(), V3, Balance())
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="make a new one"):
            copied(accumulator)


def test_what_was_fixed_at_construction_stays_fixed():
    accumulator = sgd(model(), V3, Balance())
    with pytest.raises(AttributeError):
        accumulator.balance = Balance(alpha=1.0)


def test_micro_batches_made_by_hand_are_looked_at_like_mappings():
    """Padding before a row's first token: attention must not see it, whoever built the micro-batch."""
    whole = rows(3, 4)
    left = {key: value.flip(-1) for key, value in whole.items() if key != "document_ids"}
    losses = [
        float(sgd(model(), V3, Balance()).step(Window([item])).losses["lm"]) for item in (left, MicroBatch(0, **left))
    ]
    assert losses[0] == losses[1]
    with pytest.raises(ValueError, match=r"must be token ids, torch\.int64"):
        Window([{**rows(0, 1), "labels": rows(0, 1)["labels"] > 3}])
    with pytest.raises(ValueError, match="must be a tensor, not list"):
        Window([{"input_ids": [[1, 2]], "labels": [[1, 2]]}])


def test_a_misspelled_key_is_not_dropped():
    batch = rows(0, 2)
    batch["document_id"] = batch.pop("document_ids")
    with pytest.raises(ValueError, match="takes no document_id: "):
        sgd(model(), V3, Balance()).step(Window([batch]))


def test_a_model_cast_between_steps_still_sums_in_fp32():
    """64 micro-batches in bf16: a sum in bf16 would lose whole ones."""
    found = []
    for late in (False, True):
        m = model(dtype=torch.float32 if late else torch.bfloat16)
        optimizer = torch.optim.SGD(m.parameters(), lr=0.0)
        accumulator = MoEAccumulator(m, optimizer, loss=DeepSeekLoss(V3))
        m.bfloat16()
        optimizer.register_step_pre_hook(lambda *_, m=m: found.append([p.grad.clone() for p in m.parameters()]))
        accumulator.step(Window([rows(2, 3)] * 64))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_parameters_of_different_precision_have_one_norm():
    narrow, wide = (torch.nn.Parameter(torch.zeros(2, dtype=dtype)) for dtype in (torch.bfloat16, torch.float64))
    narrow.grad, wide.grad = torch.full_like(narrow, 3.0), torch.full_like(wide, 4.0)
    assert float(grad_norm([narrow, wide])) == pytest.approx(50**0.5, rel=1e-12)


def test_statistics_of_another_model_are_not_taken():
    accumulator = sgd(model(), V3, every_loss(V3, "previous"))
    accumulator.step(window([6]))
    saved = accumulator.state_dict()
    saved["routing"]["statistics"] = saved["routing"]["statistics"][:1]
    with pytest.raises(ValueError, match="of another model, or of other balance losses"):
        sgd(model(), V3, every_loss(V3, "previous")).load_state_dict(saved)


def test_given_routing_is_whole_numbers():
    accumulator = sgd(model(), V3, Balance())
    tokens = global_batch()["input_ids"].numel()
    with pytest.raises(ValueError, match="must be experts' numbers"):
        accumulator.step(window([6]), routing=[torch.zeros(3, tokens, 2)])


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_window_that_an_exception_ended_is_as_if_it_had_not_been(where):
    results = []
    for breaks in (False, True):
        m = model()
        accumulator = sgd(m, V3, every_loss(V3, "window"))
        if breaks:
            layer, calls = m.layers[2].mlp.shared_experts, []

            def fails(*args, calls=calls):
                calls.append(1)
                if len(calls) == 2:
                    raise KeyError("boom")

            hook = layer.register_forward_pre_hook if where == "forward" else layer.register_full_backward_pre_hook
            handle = hook(fails)
            with pytest.raises(KeyError):
                accumulator.step(window([2, 4]))
            handle.remove()
        results.append((accumulator.step(window([2, 4])).total, state(m)))
    assert torch.equal(results[0][0], results[1][0]) and difference(results[0][1], results[1][1]) == 0.0


@pytest.mark.parametrize(
    ("bad", "match"),
    [([3, 99], "experts from 0 to 7"), ([-1, 2], "experts from 0 to 7"), ([3, 3], "same expert twice")],
)
def test_routing_that_no_router_could_give_is_refused(bad, match):
    m = model()
    accumulator = sgd(m, V3, Balance())
    w = window([2, 4])
    given = [torch.tensor([0, 5]).repeat(len(accumulator.ledger.routers), x.input_ids.numel(), 1) for x in w]
    given[1][1, 3] = torch.tensor(bad)
    before = state(m)
    with pytest.raises(ValueError, match=match):
        accumulator.step(w, routing=given)
    assert difference(state(m), before) == 0.0
