"""transformers' models under DDP and FSDP2: the exact scopes give the step of one process, to fp32 rounding.

1e-5 relative, as in tests/parity/test_transformers_accumulation.py: their norms and routers are fp32 whatever the dtype.
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moetrain.accumulate import MoEAccumulator, Window
from tests.support.processes import run_ranks
from tests.support.small import SPREAD, difference, state

pytest.importorskip("transformers")
from moetrain.integrations.transformers import transformers_routers
from tests.parity.test_transformers_accumulation import BOUND, MODELS, batch, losses

pytestmark = pytest.mark.dist


def step(rank, world, name, scope, wrapper, recompute, order):
    torch.manual_seed(0)
    m = MODELS[name]()
    m.train()
    vocabulary = m.config.vocab_size
    if recompute:
        m.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    wrapped = m
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(m)
    elif wrapper == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        for layer in m.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(m, mesh=mesh)
    accumulator = MoEAccumulator(
        wrapped,
        torch.optim.SGD(wrapped.parameters(), lr=0.1),
        balance=losses(scope, transformers_routers(wrapped)),
        routers=transformers_routers(wrapped),
        window_order=order,
    )
    whole = batch(vocabulary)
    padding = {k: torch.full_like(v[:1], -100 if k == "labels" else 0) for k, v in whole.items()}
    parts = [{k: v[slice(*p)] for k, v in whole.items()} if p else padding for p in SPREAD[world][rank]]
    report = accumulator.step(Window(parts))
    return report, {name: value.float() for name, value in state(m).items()}


@functools.cache
def one_process(name, scope):
    return step(0, 1, name, scope, "plain", False, "forwards_first")


LAYOUTS = [
    ("ddp", 2, False, "forwards_first"),
    ("ddp", 4, True, "forwards_first"),
    ("fsdp", 2, True, "forwards_first"),
    ("fsdp", 4, False, "forwards_first"),
    ("fsdp", 2, False, "counting_pass"),
]


CASES = [("deepseek_v3", "window"), ("deepseek_v2", "sequence"), ("mixtral", "window"), ("qwen3_moe", "window")]


@pytest.mark.parametrize(
    ("name", "scope", "layout"),
    [
        pytest.param(*model, layout, marks=[] if model is CASES[0] or layout in LAYOUTS[:3:2] else pytest.mark.slow)
        for model in CASES
        for layout in LAYOUTS
    ],
    ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v)),
)
def test_ranks_change_nothing(name, scope, layout):
    wrapper, world, recompute, order = layout
    want, parameters = one_process(name, scope)
    for got, mine in run_ranks(step, world, name, scope, wrapper, recompute, order):
        assert torch.equal(got.load, want.load) and got.valid_tokens == want.valid_tokens
        assert float(got.total) == pytest.approx(float(want.total), rel=BOUND)
        assert difference(mine, parameters) < BOUND
