"""The injected balance gradients against autograd and finite differences of the losses written out by the textbook."""

from __future__ import annotations

import pytest
import torch

from moetrain.accumulate import Balance, CausalLMLoss, MoEAccumulator, Window, update_bias
from moetrain.accumulate.balance import Routing
from moetrain.model.gate import GATES
from tests.support.small import LITE, V2, V3, model

E, K, G, M, B, T, D = 8, 2, 4, 2, 3, 10, 32
WEIGHTS = {"alpha": 0.7, "alpha_device": 0.4, "alpha_communication": 0.3}


class Lonely(torch.nn.Module):
    """A model that is one gate: its output has no gradient but the balance losses'."""

    def __init__(self, config, x_BTD):
        super().__init__()
        torch.manual_seed(0)
        self.gate = GATES[config.topk_method](config)
        torch.nn.init.normal_(self.gate.weight, std=0.5)
        self.x_BTD = x_BTD
        self.double()

    def forward(self, input_ids, attention_mask=None):
        _, weight = self.gate(self.x_BTD[input_ids[:, 0]].flatten(0, 1))
        logits = torch.zeros(*input_ids.shape, 5, dtype=torch.float64)
        return logits + 0.0 * weight.sum()


def textbook(config, gate, x_BTD, mask_BT, balance, scope):
    """The balance loss as a function of the gate's weight, with f detached (V2 eqs 23-31, V3 eqs 17-20)."""
    s = gate.score(x_BTD @ gate.weight.t())
    choice = gate.choose(s.detach().flatten(0, 1)).view(B, T, K)
    if config.model_type == "deepseek_v3":
        counted, p = s.detach().topk(K, dim=-1).indices, s / s.sum(-1, keepdim=True)
    else:
        counted, p = choice, s
    chosen = torch.zeros(B, T, E, dtype=torch.float64).scatter(2, counted, 1.0) * mask_BT.unsqueeze(-1)
    p = p * mask_BT.unsqueeze(-1)
    total = torch.zeros((), dtype=torch.float64)
    parts = [(b, b + 1) for b in range(B)] if scope == "sequence" else [(0, B)]
    for a, b in parts:
        n = mask_BT[a:b].sum().clamp(min=1)
        f = chosen[a:b].sum((0, 1)) * E / (K * n)
        P = p[a:b].sum((0, 1)) / n
        value = balance.alpha * (f * P).sum()
        if config.n_group > 1:
            Pg = P.view(G, -1).sum(1)
            value = value + balance.alpha_device * (f.view(G, -1).mean(1) * Pg).sum()
            sent = chosen[a:b].view(b - a, T, G, -1).amax(-1).sum((0, 1)) * G / (M * n)
            value = value + balance.alpha_communication * (sent * Pg).sum()
        total = total + value / len(parts)
    return total


@pytest.mark.parametrize("config", [V3, V2, LITE], ids=["V3", "V2", "V2-Lite"])
@pytest.mark.parametrize("scope", ["sequence", "window"])
def test_gradient_and_value_are_those_of_the_textbook_loss(config, scope):
    torch.manual_seed(1)
    x = torch.randn(B, T, D, dtype=torch.float64)
    mask = torch.ones(B, T, dtype=torch.int64)
    mask[1, 7:] = 0
    grouped = config.n_group > 1
    balance = Balance(scope=scope, **{k: v for k, v in WEIGHTS.items() if grouped or k == "alpha"})
    m = Lonely(config, x)
    kept = {}
    accumulator = MoEAccumulator(m, torch.optim.SGD(m.parameters(), lr=1.0), loss=CausalLMLoss(), balance=balance)
    accumulator.owner.step = lambda: kept.update(grad=m.gate.weight.grad.clone())
    ids = torch.arange(B).unsqueeze(1).expand(B, T)
    rows = [
        {"input_ids": ids[b : b + 1], "labels": ids[b : b + 1], "attention_mask": mask[b : b + 1]} for b in range(B)
    ]
    report = accumulator.step(Window(rows))

    value = textbook(config, m.gate, x, mask, balance, scope)
    (want,) = torch.autograd.grad(value, m.gate.weight)
    assert float((kept["grad"] - want).norm() / want.norm()) < 1e-12
    assert abs(float(report.losses["balance"] - value.detach())) < 1e-12

    # and the textbook gradient is the slope of the loss (choices do not move under so small a step)
    direction = torch.randn_like(want)
    h = 1e-6
    with torch.no_grad():
        chosen = _frozen_choice(m.gate, x)
        up, down = (_shifted(config, m, x, mask, balance, scope, chosen, sign * h * direction) for sign in (1, -1))
    assert abs((up - down) / (2 * h) - float((want * direction).sum())) < 1e-7


def _frozen_choice(gate, x):
    s = gate.score(x @ gate.weight.t()).flatten(0, 1)
    return gate.choose(s)


def _shifted(config, m, x, mask, balance, scope, chosen, by):
    m.gate.weight.add_(by)
    try:
        assert torch.equal(_frozen_choice(m.gate, x).sort().values, chosen.sort().values)
        return float(textbook(config, m.gate, x, mask, balance, scope))
    finally:
        m.gate.weight.sub_(by)


def test_perfect_balance_costs_alpha_and_collapse_costs_its_multiple():
    routing = Routing(experts=E, top_k=K, groups=G, top_groups=M)
    balance = Balance(alpha=0.25)
    even = torch.full((E,), 6)
    c = routing.coefficients(balance, even, torch.tensor(24.0, dtype=torch.float64))
    assert torch.allclose((c * (1 / E)).sum(), torch.tensor(0.25, dtype=torch.float64))
    collapsed = torch.zeros(E, dtype=torch.int64)
    collapsed[:K] = 24
    c = routing.coefficients(balance, collapsed, torch.tensor(24.0, dtype=torch.float64))
    p = torch.zeros(E, dtype=torch.float64)
    p[:K] = 1 / K
    assert torch.allclose((c * p).sum(), torch.tensor(0.25 * E / K, dtype=torch.float64))


def test_z_loss_gradient_is_that_of_mean_squared_logsumexp():
    torch.manual_seed(2)
    x = torch.randn(B, T, D, dtype=torch.float64)
    m = Lonely(LITE, x)
    kept = {}
    balance = Balance(z_loss=0.3)
    accumulator = MoEAccumulator(m, torch.optim.SGD(m.parameters(), lr=1.0), balance=balance)
    accumulator.owner.step = lambda: kept.update(grad=m.gate.weight.grad.clone())
    ids = torch.arange(B).unsqueeze(1).expand(B, T)
    report = accumulator.step(Window([{"input_ids": ids[b : b + 1], "labels": ids[b : b + 1]} for b in range(B)]))
    value = 0.3 * (x @ m.gate.weight.t()).logsumexp(-1).square().mean()
    (want,) = torch.autograd.grad(value, m.gate.weight)
    assert float((kept["grad"] - want).norm() / want.norm()) < 1e-12
    assert abs(float(report.losses["z"] - value.detach())) < 1e-12


def test_bias_moves_by_the_sign_of_the_missing_load_only():
    bias = torch.zeros(4)
    update_bias(bias, torch.tensor([1, 2, 3, 2]), 0.001)
    assert bias.tolist() == [pytest.approx(0.001), 0.0, pytest.approx(-0.001), 0.0]
    scaled = torch.zeros(4)
    update_bias(scaled, torch.tensor([100, 200, 300, 200]), 0.001)
    assert torch.equal(bias, scaled)
    update_bias(scaled, torch.tensor([5, 5, 5, 5]), 0.001)
    assert torch.equal(bias, scaled)


def test_a_bias_in_half_precision_is_refused():
    with pytest.raises(ValueError, match="fp32"):
        update_bias(torch.zeros(2, dtype=torch.bfloat16), torch.tensor([1, 2]), 1e-3)


def test_the_bias_stays_fp32_when_the_model_is_cast():
    m = model().to(torch.bfloat16)
    biases = [b for name, b in m.named_buffers() if name.endswith("correction_bias")]
    assert len(biases) == 3 and all(b.dtype == torch.float32 for b in biases)
