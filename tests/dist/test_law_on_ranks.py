"""The law over data ranks: FSDP2 and DDP on several processes against one process with one big batch, in float64.

The batch is uneven on purpose (tests/support/small.py): a rank without a label, a rank with nothing but padding.
"""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moetrain.accumulate import Balance, LossScale, MoEAccumulator, Window, windows
from moetrain.config.run import ParallelConfig
from moetrain.model import DeepSeekLoss
from moetrain.parallel.plan import spread
from moetrain.parallel.ranks import Ranks
from moetrain.parallel.recompute import recompute_in_backward
from tests.support.processes import run_ranks
from tests.support.small import FAMILIES, V3, difference, every_loss, full, gradients_of, model, rank_window, rows, same_report, sgd, state

pytestmark = pytest.mark.dist
STEPS = 3
BOUND = 1e-12  # float64: sums in another order, nothing else


@functools.cache
def one_process(family, scope):
    config = FAMILIES[family]
    m = model(config)
    accumulator = sgd(m, config, every_loss(config, scope))
    gradients = gradients_of(accumulator)
    return [accumulator.step(rank_window(0, 1)) for _ in range(STEPS)], gradients, state(m)


def on_rank(rank, world, family, scope, wrapper, recompute, reshard, reduce, **kwargs):
    config = FAMILIES[family]
    m = model(config)
    ranks = Ranks(rank, world, torch.device("cpu"), init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",)))
    wrapped: torch.nn.Module = m
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(m, broadcast_buffers=False)  # which would hide a bias that drifts
        if recompute == "full":
            for block in [*m.layers, *(k.block for k in m.mtp)]:
                recompute_in_backward(block)
    elif wrapper == "fsdp":
        spread(m, ParallelConfig(recompute=recompute, reshard_after_forward=reshard, reduce=reduce), "float64", ranks)
    accumulator = sgd(wrapped, config, every_loss(config, scope), reduce=reduce, **kwargs)
    gradients = gradients_of(accumulator)
    reports = [accumulator.step(rank_window(rank, world)) for _ in range(STEPS)]
    return reports, gradients, state(m)


def the_same(results, family, scope):
    """Reports, every gradient before it is clipped, and parameters of all ranks are those of one process."""
    reports, gradients, parameters = one_process(family, scope)
    for got, got_gradients, got_parameters in results:
        for a, b in zip(got, reports, strict=True):
            same_report(a, b, BOUND)
        for a, b in zip(got_gradients, gradients, strict=True):
            assert difference(a, b) < BOUND
        assert difference(got_parameters, parameters) < BOUND


LAYOUTS = [
    ("plain", 2, "none", True, "window"),
    ("ddp", 2, "none", True, "window"),
    ("ddp", 2, "full", True, "window"),
    ("ddp", 4, "none", True, "window"),
    ("ddp", 4, "full", True, "window"),
    ("fsdp", 2, "none", True, "window"),
    ("fsdp", 2, "full", True, "window"),
    ("fsdp", 2, "full", False, "micro_batch"),
    ("fsdp", 4, "none", True, "window"),
    ("fsdp", 4, "full", True, "window"),
]


SCOPES = [("V3", "window"), ("V2", "sequence"), ("V3", "sequence"), ("V3", "previous"), ("V2", "window")]
SAMPLE = (LAYOUTS[0], LAYOUTS[-1])  # of the families after the second, in the quick tests


@pytest.mark.parametrize(
    ("family", "scope", "layout"),
    [
        pytest.param(*family, layout, marks=[] if i < 2 or layout in SAMPLE else pytest.mark.slow)
        for i, family in enumerate(SCOPES)
        for layout in LAYOUTS
    ],
    ids=lambda v: v if isinstance(v, str) else "-".join(map(str, v)),
)
def test_ranks_change_nothing(family, scope, layout):
    wrapper, world, recompute, reshard, reduce = layout
    results = run_ranks(on_rank, world, family, scope, wrapper, recompute, reshard, reduce)
    the_same(results, family, scope)
    biases = [{k: v for k, v in p.items() if k.endswith("correction_bias")} for *_, p in results]
    assert all(difference(b, biases[0]) == 0.0 for b in biases if b), "the bias must be bit-equal on all ranks"


#: rank 1 has real tokens in every micro-batch, and not one label
UNLABELLED = [[(0, 1), (2, 4)], [(1, 2), (1, 2)]]


def unlabelled_on_rank(rank, world, scope, wrapper):
    config = FAMILIES["V3"]
    m = model(config)
    wrapped: torch.nn.Module = m
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(m, broadcast_buffers=False)
    elif world > 1:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
        spread(m, ParallelConfig(recompute="full"), "float64", Ranks(rank, world, torch.device("cpu"), mesh))
    accumulator = sgd(wrapped, config, every_loss(config, scope))
    mine = UNLABELLED[rank] if world > 1 else [part for rank_ in UNLABELLED for part in rank_]
    return [accumulator.step(Window(rows(*part) for part in mine)) for _ in range(2)], state(m)


@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
@pytest.mark.parametrize("scope", ["sequence", "window"])
def test_a_rank_with_tokens_and_without_a_label_changes_nothing(scope, wrapper):
    reports, parameters = unlabelled_on_rank(0, 1, scope, "plain")
    for got, mine in run_ranks(unlabelled_on_rank, 2, scope, wrapper):
        for a, b in zip(got, reports, strict=True):
            same_report(a, b, BOUND)
        assert difference(mine, parameters) < BOUND


def counting_on_rank(rank, world, wrapper, recompute):
    return on_rank(rank, world, "V3", "window", wrapper, recompute, True, "window", window_order="counting_pass")


@pytest.mark.parametrize(
    ("wrapper", "world", "recompute"), [("plain", 2, "none"), ("ddp", 2, "none"), ("fsdp", 2, "none"), ("fsdp", 4, "full")]
)
def test_a_counting_pass_changes_nothing_on_ranks(wrapper, world, recompute):
    the_same(run_ranks(counting_on_rank, world, wrapper, recompute), "V3", "window")


def half_on_rank(rank, world, wrapper):
    """Gradients of bf16 parameters as the optimizer gets them: 64 equal micro-batches in all."""
    m = model(dtype=torch.bfloat16)
    wrapped = DistributedDataParallel(m) if wrapper == "ddp" else m
    accumulator = sgd(wrapped, FAMILIES["V3"], Balance(), max_norm=None)
    kept = {}
    accumulator.optimizer.step = lambda: kept.update({n: p.grad.clone() for n, p in m.named_parameters()})
    accumulator.step(Window([rows(2, 3)] * (64 // world)))
    return kept


def half_sharded_on_rank(rank, world):
    m = model(dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"MixedPrecisionPolicy\(reduce_dtype=torch\.float32\)"):
        sgd(fully_shard(m, mesh=init_device_mesh("cpu", (world,))), FAMILIES["V3"], Balance())


def test_bf16_parameters_under_fsdp2_need_a_policy_that_sums_in_fp32():
    run_ranks(half_sharded_on_rank, 2)


@pytest.mark.parametrize("wrapper", ["plain", "ddp"])
def test_bf16_gradients_are_summed_in_fp32_over_ranks_too(wrapper):
    want = half_on_rank(0, 1, "plain")
    for got in run_ranks(half_on_rank, 2, wrapper):
        assert all(torch.equal(g, want[name]) for name, g in got.items())


def spoilt_on_rank(rank, world, wrapper):
    """The last rank's second micro-batch has a NaN loss; every rank has to forget the window."""

    class Spoilt(DeepSeekLoss):
        def __call__(self, module, micro_batch):
            out = super().__call__(module, micro_batch)
            return out * float("nan") if rank == world - 1 and micro_batch.slot == 1 else out

    config = FAMILIES["V3"]
    m = model(config)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    wrapped: torch.nn.Module = m
    if wrapper == "fsdp":
        spread(m, ParallelConfig(), "float64", Ranks(rank, world, torch.device("cpu"), mesh))
    else:
        wrapped = DistributedDataParallel(m)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    accumulator = MoEAccumulator(
        wrapped, optimizer, loss=DeepSeekLoss(config), balance=every_loss(config, "previous"), scheduler=schedule
    )

    def everything():
        moments = {f"{i}.{k}": full(v) for i, entry in optimizer.state_dict()["state"].items() for k, v in entry.items()}
        return copy.deepcopy(
            {**state(m), **moments, **accumulator.state_dict()["routing"], "rate": torch.tensor(schedule.get_last_lr())}
        )

    accumulator.step(rank_window(rank, world))
    before = everything()
    accumulator.loss = Spoilt(config)
    report = accumulator.step(rank_window(rank, world))
    after = everything()
    return report.skipped, before.keys() == after.keys() and all(torch.equal(after[k], v) for k, v in before.items())


@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
def test_a_nan_on_one_rank_discards_the_window_on_all(wrapper):
    """Weights, moments, schedule, bias and counts: bit for bit as before, on every rank."""
    for skipped, unmoved in run_ranks(spoilt_on_rank, 2, wrapper):
        assert skipped is not None and "nan" in skipped and unmoved


class Overflowing(DeepSeekLoss):
    """The right loss, and infinite gradients."""

    def __call__(self, m, micro_batch):
        sums = super().__call__(m, micro_batch)
        sums.register_hook(lambda g: g * torch.inf)
        return sums


def overflowing_on_rank(rank, world, wrapper):
    """fp16's scale with a gradient that overflows on rank 1 only, and a guard that every rank hears of."""
    config = FAMILIES["V3"]
    m = model(config, dtype=torch.float32)
    wrapped: torch.nn.Module = m
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(m, broadcast_buffers=False)
    else:
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
        spread(m, ParallelConfig(), "fp32", Ranks(rank, world, torch.device("cpu"), mesh))
    scale = LossScale(2.0**10)
    accumulator = sgd(wrapped, config, Balance(), loss_scale=scale)
    accumulator.step(rank_window(rank, world))
    before = state(m)
    accumulator.loss = Overflowing(config) if rank == 1 else accumulator.loss
    spoilt = accumulator.step(rank_window(rank, world))
    unmoved = difference(state(m), before) == 0.0
    accumulator.loss = DeepSeekLoss(config)
    return spoilt.skipped, unmoved, float(scale.value), accumulator.step(rank_window(rank, world)).skipped


@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
def test_an_overflow_on_one_rank_halves_the_scale_on_all(wrapper):
    for skipped, unmoved, scale, after in run_ranks(overflowing_on_rank, 2, wrapper):
        assert "gradient norm" in skipped and unmoved and scale == 2.0**9 and after is None


def guarded_on_rank(rank, world):
    config = FAMILIES["V3"]
    m = model(config)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    spread(m, ParallelConfig(), "float64", Ranks(rank, world, torch.device("cpu"), mesh))
    before = state(m)
    accumulator = sgd(m, config, Balance(), skip_if=lambda norm: f"{norm:.3f} is too much" if norm > 1e-3 else None)
    return accumulator.step(rank_window(rank, world)).skipped, difference(state(m), before)


def test_a_guard_discards_the_window_on_all_ranks():
    (said, moved), (other, other_moved) = run_ranks(guarded_on_rank, 2)
    assert said == other and said.endswith("is too much") and moved == other_moved == 0.0


def forced(m):
    """Routing forced by the correction bias: expert 0 gets every token, most experts none."""
    for name, bias in m.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias[0], bias[1] = 10.0, 5.0
    return m


def forced_on_rank(rank, world, scope, wrapper):
    config = FAMILIES["V3"]
    m = forced(model(config))
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    wrapped: torch.nn.Module = m
    if wrapper == "fsdp":
        spread(m, ParallelConfig(recompute="full"), "float64", Ranks(rank, world, torch.device("cpu"), mesh))
    else:
        wrapped = DistributedDataParallel(m)
    accumulator = sgd(wrapped, config, every_loss(config, scope, bias_rate=0.0))
    reports = [accumulator.step(rank_window(rank, world)) for _ in range(2)]
    return reports, state(m)


@pytest.mark.parametrize("wrapper", ["fsdp", "ddp"])
@pytest.mark.parametrize("scope", ["sequence", "previous", "window"])
def test_starved_experts_and_one_that_takes_all_change_nothing_on_ranks(scope, wrapper):
    config = FAMILIES["V3"]
    m = forced(model(config))
    accumulator = sgd(m, config, every_loss(config, scope, bias_rate=0.0))
    reports = [accumulator.step(rank_window(0, 1)) for _ in range(2)]
    assert bool((reports[-1].load == 0).any())
    for got, parameters in run_ranks(forced_on_rank, 2, scope, wrapper):
        for a, b in zip(got, reports, strict=True):
            same_report(a, b, BOUND)
        assert difference(parameters, state(m)) < BOUND


def norms_on_rank(rank, world):
    """One norm whatever the wrapper: sharded gradients, and replicated ones counted once."""
    config = FAMILIES["V3"]
    m = model(config)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    spread(m, ParallelConfig(), "float64", Ranks(rank, world, torch.device("cpu"), mesh))
    kept = {}
    accumulator = sgd(m, config, every_loss(config, "sequence"), max_norm=None)
    accumulator.owner.step = lambda: kept.update({n: p.grad.full_tensor() for n, p in m.named_parameters()})
    report = accumulator.step(rank_window(rank, world))
    return float(report.grad_norm), float(torch.nn.utils.get_total_norm(list(kept.values())))


def test_the_norm_of_shards_is_the_norm_of_the_whole():
    results = run_ranks(norms_on_rank, 2)
    assert results[0] == results[1]
    reported, whole = results[0]
    assert abs(reported - whole) < 1e-12 * whole


def uneven_on_rank(rank, world):
    """Rank 0 has five micro-batches, rank 1 two, rank 2 none: windows of two each, filled up."""
    parts = [[(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)], [(5, 6), (2, 4)], []][rank]
    m = model()
    accumulator = sgd(m, V3, every_loss(V3, "window"))
    group = dist.group.WORLD if world > 1 else None
    return [accumulator.step(w) for w in windows([rows(*part) for part in parts], 2, group=group)], state(m)


def test_ranks_with_fewer_micro_batches_fill_up_and_end_together():
    m = model()
    accumulator = sgd(m, V3, every_loss(V3, "window"))
    together = [[(0, 1), (1, 2), (5, 6), (2, 4)], [(2, 3), (3, 4)], [(4, 5)]]
    want = [accumulator.step(Window(rows(*part) for part in parts)) for parts in together]
    for reports, parameters in run_ranks(uneven_on_rank, 3):
        assert len(reports) == 3
        for a, b in zip(reports, want, strict=True):
            same_report(a, b, 1e-12)
        assert difference(parameters, state(m)) < 1e-12
