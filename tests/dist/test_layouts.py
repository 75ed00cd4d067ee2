"""The matrix of layouts: each against one process with one big batch, every gradient as such, in float64.

Expert-parallel ranks x shards x copies x stages (every schedule) x recompute x balance scope, for V3 with multi-token
prediction and V2 with its device and communication losses, up to eight processes. Compared are loss terms, counts,
norm, every gradient before it is clipped (gathered from its shards, expert ranks and stages), bias and parameters
after three steps. 1e-12 relative: sums in another order, nothing else.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass
from itertools import product

import pytest
import torch

from moetrain.accumulate import MoEAccumulator
from moetrain.config.run import SPLIT_BACKWARD, ParallelConfig
from moetrain.engine.pipeline import SCHEDULES, Pipeline
from moetrain.model import DeepSeekLoss
from moetrain.parallel.plan import spread
from moetrain.parallel.ranks import Ranks, meshes
from tests.support.processes import run_ranks
from tests.support.small import (
    FAMILIES,
    difference,
    every_loss,
    gradients_of,
    model,
    rank_window,
    same_report,
    sgd,
    state,
    window,
)

pytestmark = pytest.mark.dist
BOUND = 1e-12
STEPS = 3
SCOPES = ("sequence", "window", "previous")


@dataclass(frozen=True)
class Layout:
    """``shards``: data ranks of one copy; ``ep`` divides them."""

    ep: int
    shards: int
    copies: int
    schedule: str | None
    recompute: str

    @property
    def pp(self):
        return 2 if self.schedule else 1

    @property
    def world(self):
        return self.shards * self.copies * self.pp

    def __str__(self):
        stages = f"-{self.schedule}" if self.schedule else ""
        return f"ep{self.ep}-shards{self.shards}-copies{self.copies}{stages}-{self.recompute}"


def every_layout():
    """All that are offered on two to eight ranks. Schedules that split the backward take no recompute."""
    for ep, each, copies, schedule in product((1, 2, 4), (1, 2), (1, 2), (None, *SCHEDULES)):
        for recompute in ("none", "selective", "full"):
            layout = Layout(ep, ep * each, copies, schedule, recompute)
            if 2 <= layout.world <= 8 and not (schedule in SPLIT_BACKWARD and recompute != "none"):
                yield layout


LAYOUTS = list(every_layout())


def scope_of(layout, family):
    """One for each, so that all meet all; by the name, so that it stays."""
    return SCOPES[zlib.crc32(f"{layout} {family}".encode()) % len(SCOPES)]


def config_of(family):
    return FAMILIES[family].model_copy(update={"num_hidden_layers": 5})


@functools.cache
def one_process(family, scope):
    config = config_of(family)
    m = model(config)
    accumulator = sgd(m, config, every_loss(config, scope))
    gradients = gradients_of(accumulator)
    return [accumulator.step(rank_window(0, 1)) for _ in range(STEPS)], gradients, state(m)


def on_rank(rank, world, layout, family, scope):
    config = config_of(family)
    plan = ParallelConfig(
        ep=layout.ep,
        dp_replicate=layout.copies,
        pp=layout.pp,
        schedule=layout.schedule or "1f1b",
        recompute=layout.recompute,
        reshard_after_forward=layout.schedule not in SPLIT_BACKWARD,
    )
    where = meshes("cpu", world, dp_replicate=layout.copies, ep=layout.ep, pp=layout.pp, need_group=layout.pp == 1)
    ranks = Ranks(rank, world, torch.device("cpu"), *where)
    m = model(config)
    spread(m, plan, "float64", ranks)
    loss = DeepSeekLoss(config)
    accumulator = MoEAccumulator(
        m,
        torch.optim.SGD(m.parameters(), lr=0.5),
        loss=loss,
        balance=every_loss(config, scope),
        max_norm=1.0,
        groups=ranks.groups,
        pipeline=None if ranks.pipe is None else Pipeline(m, loss, plan, ranks, dtype=torch.float64),
    )
    gradients = gradients_of(accumulator)
    mine = rank_window(ranks.data_rank, ranks.data_world) if ranks.data_world > 1 else window((1, 0, 3, 1, 0, 1))
    return [accumulator.step(mine) for _ in range(STEPS)], gradients, state(m)


def agree(layout, family):
    scope = scope_of(layout, family)
    reports, gradients, parameters = one_process(family, scope)
    found = run_ranks(on_rank, layout.world, layout, family, scope)
    for got, got_gradients, got_parameters in found:
        for a, b in zip(got, reports, strict=True):
            same_report(a, b, BOUND)
        for a, b in zip(got_gradients, gradients, strict=True):
            assert difference(a, {name: b[name] for name in a}) < BOUND
        assert difference(got_parameters, {name: parameters[name] for name in got_parameters}) < BOUND
    # no gradient and no parameter got lost between the stages
    assert set().union(*(rank[1][0] for rank in found)) == gradients[0].keys()
    assert set().union(*(rank[2] for rank in found)) == parameters.keys()


def test_the_matrix_has_every_kind():
    assert len(LAYOUTS) >= 40 and {layout.ep for layout in LAYOUTS} == {1, 2, 4}
    assert {layout.schedule for layout in LAYOUTS if layout.ep == 4} == {None, *SCHEDULES}
    for family in ("V3", "V2"):
        assert {scope_of(layout, family) for layout in LAYOUTS} == set(SCOPES)


@pytest.mark.parametrize(
    ("layout", "family"),
    [
        (Layout(4, 4, 1, None, "none"), "V2"),  # device and communication losses on the config's groups, not on ranks
        (Layout(4, 4, 1, "1f1b", "full"), "V3"),
        (Layout(2, 4, 1, None, "selective"), "V2"),
        (Layout(1, 2, 2, None, "full"), "V3"),
        (Layout(2, 2, 1, "dualpipev", "none"), "V2"),
    ],
    ids=str,
)
def test_a_layout_changes_nothing(layout, family):
    agree(layout, family)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["V3", "V2"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_no_layout_changes_anything(layout, family):
    agree(layout, family)
