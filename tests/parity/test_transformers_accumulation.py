"""The accumulation core on transformers' models: the exact scopes change nothing by how a batch is cut.

transformers computes norms and routers in fp32 whatever the dtype, so float64 agrees to fp32 rounding: 1e-5 relative
in the parameters after a step of gradient descent whose gradients are of order one.
"""

from __future__ import annotations

import pytest
import torch

from moetrain.accumulate import Balance, MoEAccumulator, Window
from moetrain.integrations.transformers import ROUTERS, transformers_routers
from moetrain.model import DeepSeekLoss
from tests.support.small import difference, global_batch
from tests.support.twins import as_theirs, twins

t = pytest.importorskip("transformers")
BOUND = 1e-5


def qwen():
    config = t.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=8, num_experts_per_tok=2,
        use_cache=False,
    )  # fmt: skip
    return t.Qwen3MoeForCausalLM(config)


def mixtral():
    config = t.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=8, num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    return t.MixtralForCausalLM(config)


MODELS = {
    "deepseek_v2": lambda: twins("deepseek_v2", 2, torch.float32)[1],
    "deepseek_v3": lambda: twins("deepseek_v3", 2, torch.float32)[1],
    "qwen3_moe": qwen,
    "mixtral": mixtral,
}


def batch(vocabulary):
    whole = {k: v for k, v in global_batch().items() if k != "document_ids"}
    keep = whole["labels"] != -100
    whole["input_ids"] = whole["input_ids"] % vocabulary
    whole["labels"] = whole["input_ids"].masked_fill(~keep, -100)
    return whole


def losses(scope, routers):
    biased = any(router.bias() is not None for router in routers)
    return Balance(scope=scope, alpha=0.5, z_loss=0.01, bias_rate=1e-3 if biased else 0.0)


def run(make, scope, sizes, recompute=False):
    torch.manual_seed(0)
    m = make()
    m.train()
    if recompute:
        m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    routers = transformers_routers(m)
    balance = losses(scope, routers)
    assert len(routers) >= 2
    accumulator = MoEAccumulator(m, torch.optim.SGD(m.parameters(), lr=0.1), balance=balance, routers=routers)
    whole = batch(m.config.vocab_size)
    windows = []
    first = 0
    for size in sizes:
        windows.append({k: v[first : first + size] for k, v in whole.items()})
        first += size
    report = accumulator.step(Window(windows))
    return report, {k: v.detach().float() for k, v in (*m.named_parameters(), *m.named_buffers())}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scope", ["sequence", "window"])
def test_cutting_and_recompute_change_nothing(name, scope):
    want, parameters = run(MODELS[name], scope, [6])
    assert float(want.losses["balance"]) > 0.1 and want.skipped is None
    for sizes, recompute in (([2, 1, 3], False), ([1, 5], True)):
        got, cut = run(MODELS[name], scope, sizes, recompute)
        assert torch.equal(got.load, want.load)
        assert abs(float(got.total - want.total)) < BOUND * float(want.total)
        assert difference(cut, parameters) < BOUND


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("scope", ["micro_batch", "running", "previous"])
def test_the_other_scopes_follow_the_cut_and_not_recompute(name, scope):
    want, parameters = run(MODELS[name], scope, [2, 1, 3])
    got, again = run(MODELS[name], scope, [2, 1, 3], recompute=True)
    assert torch.equal(got.load, want.load) and difference(again, parameters) < BOUND
    if scope != "previous":  # of which there is none in a first step
        _, whole = run(MODELS[name], scope, [6])
        _, exact = run(MODELS[name], "window", [6])
        assert difference(whole, exact) < BOUND  # one micro-batch is the batch
        assert difference(parameters, exact) > 10 * BOUND


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("scope", ["sequence", "window", "running", "micro_batch"])
def test_their_model_takes_the_step_that_ours_takes(family, scope):
    """The hook injects the very gradient that our own gates inject."""
    ours, theirs = twins(family, 2, torch.float32)
    balance = losses(scope, transformers_routers(theirs))
    steps = []
    for m, loss, routers in ((ours, DeepSeekLoss(ours.config), None), (theirs, None, transformers_routers(theirs))):
        m.train()
        kwargs = {} if loss is None else {"loss": loss}
        sgd = torch.optim.SGD(m.parameters(), lr=0.1)
        accumulator = MoEAccumulator(m, sgd, balance=balance, routers=routers, **kwargs)
        whole = batch(ours.config.vocab_size)
        steps.append(accumulator.step(Window({k: v[i : i + 2] for k, v in whole.items()} for i in (0, 2, 4))))
    assert torch.equal(steps[0].load, steps[1].load)
    for term in steps[0].losses:
        assert float(steps[0].losses[term]) == pytest.approx(float(steps[1].losses[term]), rel=BOUND), term
    mine = as_theirs({**dict(ours.named_parameters()), **dict(ours.named_buffers())})
    other = {**dict(theirs.named_parameters()), **dict(theirs.named_buffers())}
    assert difference({k: v.detach() for k, v in mine.items()}, {k: other[k].detach() for k in mine}) < 5e-5


@pytest.mark.parametrize("name", MODELS)
def test_given_choices_are_weighed_by_the_models_own_scores(name):
    """The router's own choice with its columns in another order is the same mixture; another choice is another."""
    torch.manual_seed(0)
    m = MODELS[name]()
    whole = batch(m.config.vocab_size)
    chosen: list[torch.Tensor] = []
    routers = [x for x in m.modules() if type(x).__name__ in ROUTERS]
    hooks = [r.register_forward_hook(lambda _, __, out: chosen.append(out[2].detach().clone())) for r in routers]
    with torch.no_grad():
        m(input_ids=whole["input_ids"], attention_mask=whole["attention_mask"])
    for hook in hooks:
        hook.remove()
    own = torch.stack(chosen)
    sgd = torch.optim.SGD(m.parameters(), lr=0.0)
    accumulator = MoEAccumulator(m, sgd, routers=transformers_routers(m))
    losses = [
        float(accumulator.step(Window([whole]), routing=routing).total)
        for routing in (None, [own], [own.flip(-1)], [(own + 1) % routers[0].weight.shape[0]])
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6) and losses[2] == pytest.approx(losses[0], rel=1e-6)
    assert abs(losses[3] - losses[0]) > 1e-5
