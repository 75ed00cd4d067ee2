"""The model cut into pipeline stages: the same step as one process, in float64, under every schedule.

1e-12 relative: sums in another order, nothing else.
"""

from __future__ import annotations

import functools

import pytest
import torch

from moetrain.accumulate import MoEAccumulator
from moetrain.config.run import SPLIT_BACKWARD, ParallelConfig
from moetrain.engine.pipeline import SCHEDULES, Pipeline
from moetrain.model import DeepSeekLoss
from moetrain.parallel.plan import spread
from moetrain.parallel.ranks import Ranks, meshes
from tests.support.processes import run_ranks
from tests.dist.test_expert_parallel import routed_to
from tests.support.small import FAMILIES, every_loss, model, rank_window, same_report, sgd, state, window

pytestmark = pytest.mark.dist
BOUND = 1e-12
LAYERS = {"num_hidden_layers": 5}


def config_of(family):
    return FAMILIES[family].model_copy(update=LAYERS)


#: micro-batches of a pipeline without data ranks: unequal, two of them empty; rows have to be filled up
CUT = (1, 0, 3, 1, 0, 1)


def steps(accumulator, rank, world, sizes=CUT):
    return [accumulator.step(window(sizes) if world == 1 else rank_window(rank, world)) for _ in range(3)]


@functools.cache
def one_process(family, scope, sizes=(6,), forced=()):
    config = config_of(family)
    m = routed_to(model(config), forced)
    return steps(sgd(m, config, balance_of(config, scope, forced)), 0, 1, sizes), state(m)


def balance_of(config, scope, forced):
    """Forced routing stays forced: the bias does not move."""
    return every_loss(config, scope, **({"bias_rate": 0.0} if forced else {}))


def staged(rank, world, config, forced=(), **plan):
    parallel = ParallelConfig(reshard_after_forward=plan.get("schedule") not in SPLIT_BACKWARD, **plan)
    where = {"pp": parallel.pp, "ep": parallel.ep, "dp_replicate": parallel.dp_replicate, "need_group": False}
    ranks = Ranks(rank, world, torch.device("cpu"), *meshes("cpu", world, **where))
    m = routed_to(model(config), forced)
    spread(m, parallel, "float64", ranks)
    loss = DeepSeekLoss(config)
    return m, ranks, loss, Pipeline(m, loss, parallel, ranks, dtype=torch.float64)


def on_rank(rank, world, family, scope, sizes, forced, plan):
    config = config_of(family)
    m, ranks, loss, pipeline = staged(rank, world, config, forced, **plan)
    accumulator = MoEAccumulator(
        m,
        torch.optim.SGD(m.parameters(), lr=0.5),
        loss=loss,
        balance=balance_of(config, scope, forced),
        max_norm=1.0,
        groups=ranks.groups,
        pipeline=pipeline,
        reduce=plan.get("reduce", "window"),
    )
    return steps(accumulator, ranks.data_rank, ranks.data_world, sizes), state(m)


def agree(world, family, scope, sizes=CUT, want=(6,), forced=(), **plan):
    reports, parameters = one_process(family, scope, want, forced)
    found = set()
    for got, part in run_ranks(on_rank, world, family, scope, sizes, forced, plan):
        for a, b in zip(got, reports, strict=True):
            same_report(a, b, BOUND)
        for name, value in part.items():
            apart = float((value - parameters[name]).norm() / parameters[name].norm().clamp(min=1e-30))
            assert apart < BOUND, name
        found |= part.keys()
    assert found == parameters.keys()  # no parameter got lost between the stages


@pytest.mark.parametrize("scope", ["sequence", "window"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_change_nothing(schedule, scope):
    agree(2, "V3", scope, pp=2, schedule=schedule)


@pytest.mark.parametrize("sizes", [(6,), (2, 2, 2)])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nor_where_there_are_fewer_micro_batches_than_a_schedule_needs(schedule, sizes):
    agree(2, "V3", "sequence", sizes, pp=2, schedule=schedule)


@pytest.mark.parametrize("scope", ["running", "micro_batch"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "dualpipev"])
def test_a_scope_that_depends_on_the_cut_depends_on_nothing_else(schedule, scope):
    """Running counts go slot by slot in every stage, so they are those of one process with the same micro-batches."""
    agree(2, "V3", scope, CUT, CUT, pp=2, schedule=schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nor_do_stages_of_a_sharded_model(schedule):
    agree(4, "V3", "sequence", pp=2, schedule=schedule)


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
@pytest.mark.parametrize("scope", ["sequence", "window"])
def test_nor_with_experts_spread_in_each_stage(schedule, scope):
    agree(4, "V3", scope, pp=2, ep=2, schedule=schedule)


@pytest.mark.parametrize("recompute", ["full", "selective"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "looped_bfs"])
def test_nor_with_recompute(schedule, recompute):
    agree(4, "V3", "window", pp=2, schedule=schedule, recompute=recompute)


@pytest.mark.parametrize("family", ["V2", "V2-Lite"])
def test_nor_in_the_other_families(family):
    agree(2, family, "window", pp=2, schedule="1f1b")


@pytest.mark.parametrize("scope", ["previous", "window"])
def test_nor_where_gradients_are_reduced_each_time(scope):
    agree(4, "V3", scope, pp=2, schedule="1f1b", reduce="micro_batch")


def test_nor_do_more_than_two_ranks_whose_ends_share_the_embedding():
    agree(4, "V3", "sequence", pp=4, schedule="1f1b")


@pytest.mark.parametrize("forced", [(0, 1), (6, 7)])
def test_nor_where_one_rank_gets_every_token_and_another_none(forced):
    agree(4, "V3", "sequence", pp=2, ep=2, schedule="interleaved_zero_bubble", forced=forced)


def eight(family, scope, schedule, recompute):
    agree(8, family, scope, pp=2, ep=2, dp_replicate=2, schedule=schedule, recompute=recompute)


def test_nor_does_everything_at_once_on_eight_ranks():
    """Two stages of two copies of which each spreads its experts over two ranks."""
    eight("V3", "window", "interleaved_1f1b", "full")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["V3", "V2"])
@pytest.mark.parametrize("scope", ["sequence", "window", "previous"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_nor_in_any_combination_of_it(schedule, scope, family):
    eight(family, scope, schedule, "none" if schedule in SPLIT_BACKWARD else "full")


def growing_on_rank(rank, world):
    """Windows of other lengths, as a batch ramp gives them, and evaluation in between."""
    config = config_of("V3")
    m, ranks, loss, pipeline = staged(rank, world, config, pp=2, schedule="1f1b")
    accumulator = MoEAccumulator(
        m, torch.optim.SGD(m.parameters(), lr=0.5), loss=loss, balance=every_loss(config, "window"), max_norm=1.0,
        groups=ranks.groups, pipeline=pipeline,
    )  # fmt: skip
    sums = []
    for sizes in ((1,) * 6, (3, 3), (2, 2, 2), (6,)):
        accumulator.step(window(sizes))
        sums.append(pipeline.forward(window((4, 2))))
    return len(pipeline._schedules), sums, state(m)


def test_windows_of_other_lengths_leave_nothing_behind():
    config = config_of("V3")
    m = model(config)
    accumulator = sgd(m, config, every_loss(config, "window"))
    want = []
    for _ in range(4):
        accumulator.step(window((6,)))
        with torch.no_grad():
            want.append(accumulator.loss(m, window((6,))[0]))
    found = run_ranks(growing_on_rank, 2)
    for kept, _, parameters in found:
        assert kept == 2
        assert all(float((value - state(m)[name]).norm() / state(m)[name].norm().clamp(min=1e-30)) < BOUND
                   for name, value in parameters.items())  # fmt: skip
    for step in range(4):
        assert torch.allclose(sum(sums[step] for _, sums, _ in found), want[step], rtol=BOUND)
