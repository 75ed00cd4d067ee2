"""The known faults of others that show on several ranks only (numbers as in tests/unit/test_pitfalls.py)."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from moetrain.accumulate import Balance, Window
from moetrain.config.run import ParallelConfig
from moetrain.parallel.plan import spread
from moetrain.parallel.ranks import Ranks, meshes
from tests.support.processes import run_ranks
from tests.support.small import V3, difference, every_loss, model, rank_window, rows, sgd, state

pytestmark = pytest.mark.dist


def on_rank(rank, world, wrapper):
    m = model()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",))
    wrapped: torch.nn.Module = m
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(m)
    elif wrapper == "fsdp":
        spread(m, ParallelConfig(), "float64", Ranks(rank, world, torch.device("cpu"), mesh))
    report = sgd(wrapped, V3, every_loss(V3, "sequence")).step(rank_window(rank, world))
    return report, state(m)


@functools.cache
def one_process():
    m = model()
    return sgd(m, V3, every_loss(V3, "sequence")).step(rank_window(0, 1)), state(m)


@functools.cache
def ranks(world, wrapper):
    return run_ranks(on_rank, world, wrapper)


LAYOUTS = pytest.mark.parametrize(("world", "wrapper"), [(2, "plain"), (2, "ddp"), (2, "fsdp"), (4, "fsdp")])


@LAYOUTS
def test_A1_A4_A5_no_term_is_a_mean_of_rank_means(world, wrapper):
    """Ranks have 0 to 30 valid tokens, and other numbers of MTP targets: a rank without any gives no nan."""
    want, _ = one_process()
    for report, _ in ranks(world, wrapper):
        for term in ("lm", "mtp_1"):
            assert float(report.losses[term]) == pytest.approx(float(want.losses[term]), rel=1e-12)


@LAYOUTS
def test_B1_B3_the_balance_loss_is_no_smaller_on_more_ranks(world, wrapper):
    want, _ = one_process()
    for report, _ in ranks(world, wrapper):
        assert float(report.losses["balance"]) == pytest.approx(float(want.losses["balance"]), rel=1e-12)
        assert float(report.losses["z"]) == pytest.approx(float(want.losses["z"]), rel=1e-12)


@LAYOUTS
def test_F1_the_norm_is_one_number_on_all_ranks_and_that_of_one_process(world, wrapper):
    want, _ = one_process()
    norms = [float(report.grad_norm) for report, _ in ranks(world, wrapper)]
    assert len(set(norms)) == 1 and norms[0] == pytest.approx(float(want.grad_norm), rel=1e-12)


def two_axes_on_rank(rank, world):
    """Four ranks as 2 x 2: tokens are split over both axes, and each is a process group of its own."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    m = model()
    groups = [mesh.get_group("a"), mesh.get_group("b")]
    report = sgd(m, V3, every_loss(V3, "window"), groups=groups).step(rank_window(rank, world))
    return report, state(m)


def one_axis_on_rank(rank, world, wrapper):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    m = model()
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(m, process_group=mesh.get_group("a"))
    else:
        wrapped = fully_shard(m, mesh=mesh["a"])
    with pytest.raises(ValueError, match="sums gradients over 2 ranks, and groups say that tokens are split over 4"):
        sgd(wrapped, V3, Balance(), groups=[mesh.get_group("a"), mesh.get_group("b")])


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_C4_a_wrapper_over_one_of_two_axes_is_refused(wrapper):
    run_ranks(one_axis_on_rank, 4, wrapper)


def experts_on_rank(rank, world):
    m = model()
    spread(m, ParallelConfig(ep=2), "float64", Ranks(rank, world, torch.device("cpu"), *meshes("cpu", world, ep=2)))
    return sgd(m, V3, every_loss(V3, "window")).step(rank_window(rank, world))


def test_F1_B1_the_norm_and_the_balance_loss_are_those_of_one_process_where_experts_are_spread():
    """Dense gradients are summed over all ranks, experts' over those that hold them, and each counts once."""
    want = sgd(model(), V3, every_loss(V3, "window")).step(rank_window(0, 1))
    norms = []
    for report in run_ranks(experts_on_rank, 4):
        norms.append(float(report.grad_norm))
        assert float(report.losses["balance"]) == pytest.approx(float(want.losses["balance"]), rel=1e-12)
    assert len(set(norms)) == 1 and norms[0] == pytest.approx(float(want.grad_norm), rel=1e-12)


def test_C4_counts_are_summed_over_every_axis_that_splits_tokens():
    whole = model()
    want = sgd(whole, V3, every_loss(V3, "window")).step(rank_window(0, 1))
    for report, parameters in run_ranks(two_axes_on_rank, 4):
        assert torch.equal(report.load, want.load) and report.routed_tokens == want.routed_tokens
        assert difference(parameters, state(whole)) < 1e-12


def short_on_rank(rank, world):
    """The last, shorter window: rank 0 has a row more than rank 1, which pads."""
    m = model()
    accumulator = sgd(m, V3, every_loss(V3, "sequence"))
    accumulator.step(Window([rows(2 * rank, 2 * rank + 1), rows(2 * rank + 1, 2 * rank + 2)]))
    padding = {k: torch.full_like(v, -100 if k == "labels" else 0) for k, v in rows(5, 6).items()}
    accumulator.step(Window([rows(4, 6) if rank == 0 else padding]))
    return state(m)


def test_A6_a_last_window_that_not_every_rank_can_fill_is_exact():
    m = model()
    accumulator = sgd(m, V3, every_loss(V3, "sequence"))
    accumulator.step(Window([rows(0, 4)]))
    accumulator.step(Window([rows(4, 6)]))
    for parameters in run_ranks(short_on_rank, 2):
        assert difference(parameters, state(m)) < 1e-12
