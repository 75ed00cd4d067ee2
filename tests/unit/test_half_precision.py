"""bf16 and fp16 parameters: sums of many micro-batches lose nothing, and fp16 overflows cost one window each."""

from __future__ import annotations

import pytest
import torch

from moetrain.accumulate import Balance, MoEAccumulator, Window
from moetrain.accumulate.loss_scale import LossScale
from moetrain.model import DeepSeekLoss
from tests.support.small import V3, difference, every_loss, model, rows, sgd, state, window


def gradients_of(m, w, **kwargs):
    """What the optimizer is given."""
    kept = {}
    kwargs = {"loss": DeepSeekLoss(V3), **kwargs}
    accumulator = MoEAccumulator(m, torch.optim.SGD(m.parameters(), lr=0.0), balance=Balance(), **kwargs)
    accumulator.optimizer.step = lambda: kept.update({n: p.grad.clone() for n, p in m.named_parameters()})
    report = accumulator.step(w)
    assert report.skipped is None
    return kept


def test_bf16_gradients_of_many_micro_batches_are_summed_in_fp32():
    """256 equal micro-batches weigh 1/256 each: in bf16 their sum would stand still half way; here it is exact."""
    one = gradients_of(model(dtype=torch.bfloat16), Window([rows(2, 3)]))
    many = gradients_of(model(dtype=torch.bfloat16), Window([rows(2, 3)] * 256))
    for name, g in many.items():
        assert g.dtype == torch.bfloat16
        assert torch.equal(g, one[name]), name


def test_the_optimizer_steps_bf16_parameters_and_nothing_of_the_window_is_left():
    m = model(dtype=torch.bfloat16)
    before = state(m)
    report = sgd(m, V3, every_loss(V3, "sequence")).step(window([2, 4]))
    assert report.skipped is None and difference(state(m), before) > 0
    assert all(p.grad is None and p.dtype == p.grad_dtype == torch.bfloat16 for p in m.parameters())


@pytest.mark.parametrize("scope", ["sequence", "window"])
def test_a_loss_scale_changes_no_bit_of_a_step(scope):
    """A power of two rounds nothing: loss terms, balance and z gradients, norm, clip."""

    def run(**kwargs):
        m = model()
        accumulator = sgd(m, V3, every_loss(V3, scope), **kwargs)
        return [accumulator.step(window([2, 1, 3])) for _ in range(2)], state(m)

    plain, want = run()
    scaled, got = run(loss_scale=LossScale(2.0**16))
    assert difference(got, want) < 1e-15
    for a, b in zip(scaled, plain, strict=True):
        assert a.loss_scale == 2.0**16 and float(a.grad_norm) == pytest.approx(float(b.grad_norm), rel=1e-15)
        assert float(a.total) == pytest.approx(float(b.total), rel=1e-15)


def test_an_overflow_halves_the_scale_and_costs_nothing_else():
    m = model(dtype=torch.float16)
    scale = LossScale(2.0**40)
    accumulator = sgd(m, V3, every_loss(V3, "previous"), loss_scale=scale)
    before = state(m)
    discarded = 0
    while (report := accumulator.step(window([3, 3]))).skipped is not None:
        assert "gradient norm" in report.skipped and difference(state(m), before) == 0.0
        discarded += 1
        assert scale.value == 2.0 ** (40 - discarded)
    assert discarded > 5 and difference(state(m), before) > 0


def test_a_scale_keeps_fp16_gradients_from_vanishing():
    """A token of a large batch weighs little: without a scale its gradients fall below fp16's smallest number."""

    want = gradients_of(model(), Window([rows(2, 3)]), loss=Faint(V3))

    def error(scale):
        kept = {}

        def keep(m):
            kept.update({n: p.grad.double() / scale for n, p in m.named_parameters()})

        m = model(dtype=torch.float16)
        accumulator = MoEAccumulator(
            m, torch.optim.SGD(m.parameters(), lr=0.0), loss=Faint(V3), loss_scale=LossScale(scale)
        )
        accumulator.owner.norm = lambda: keep(m) or torch.ones(())  # where the fp32 sums are, still scaled
        accumulator.step(Window([rows(2, 3)]))
        return max(float((kept[n] - w).norm() / w.norm()) for n, w in want.items() if "experts" in n)

    assert error(2.0**16) < 0.02 < 0.2 < error(1.0)


class Faint(DeepSeekLoss):
    weights = (1e-6, 1e-6)


def test_the_scale_grows_after_accepted_windows_and_survives_a_checkpoint():
    scale = LossScale(4.0, interval=2)
    for _ in range(3):
        scale.accepted()
    assert (scale.value, scale.good) == (8.0, 1)
    other = LossScale()
    other.load_state_dict(scale.state_dict())
    other.accepted()
    assert other.value == 8.0 and other.good == 2
    scale.overflowed()
    assert (scale.value, scale.good) == (4.0, 0)
    for value in (3.0, 0.0, -2.0):
        with pytest.raises(ValueError, match="power of two"):
            LossScale(value)
