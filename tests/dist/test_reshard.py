"""A checkpoint of any number of ranks goes on on any other: same losses, same parameters."""

from __future__ import annotations

import resource

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from moetrain.accumulate import MoEAccumulator
from moetrain.checkpoint import CheckpointFolder, from_pretrained, save_pretrained
from moetrain.config.run import ParallelConfig
from moetrain.errors import UserError
from moetrain.model import DeepSeekLoss
from moetrain.optim import build_adamw, parameter_groups
from moetrain.parallel.plan import spread
from moetrain.parallel.ranks import Ranks
from tests.support.processes import run_ranks
from tests.support.small import V3, difference, every_loss, model, rank_window, state

pytestmark = pytest.mark.dist


def built(rank, world):
    """FSDP2 over all ranks; a plain model on one."""
    m = model(V3)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",)) if world > 1 else None
    spread(m, ParallelConfig(), "float64", Ranks(rank, world, torch.device("cpu"), mesh))
    optimizer, _ = build_adamw(parameter_groups(m, 0.1), lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    accumulator = MoEAccumulator(m, optimizer, loss=DeepSeekLoss(V3), balance=every_loss(V3, "previous"), max_norm=1.0)
    return m, optimizer, accumulator


def save_on(rank, world, folder, steps):
    m, optimizer, accumulator = built(rank, world)
    for _ in range(steps):
        accumulator.step(rank_window(rank, world))
    extra = {"accumulator": accumulator.state_dict()}
    CheckpointFolder(folder).save(steps, model=m, optimizer=optimizer, extra=extra, config={})
    return continue_with(rank, world, m, accumulator)


def load_on(rank, world, folder):
    m, optimizer, accumulator = built(rank, world)
    extra = CheckpointFolder(folder).load_latest(model=m, optimizer=optimizer)
    assert extra is not None
    accumulator.load_state_dict(extra["accumulator"])
    return continue_with(rank, world, m, accumulator)


def continue_with(rank, world, m, accumulator):
    losses = [float(accumulator.step(rank_window(rank, world)).total) for _ in range(2)]
    return losses, state(m)


def compare(got, want, bound):
    for (losses, parameters), (want_losses, want_parameters) in zip(got, [want[0]] * len(got), strict=True):
        assert all(abs(a - b) <= bound * abs(b) for a, b in zip(losses, want_losses, strict=True))
        assert difference(parameters, want_parameters) <= bound


@pytest.mark.parametrize(("save", "load"), [(2, 1), (2, 4), (4, 2), (1, 2), (2, 2)])
def test_saved_by_some_goes_on_with_others(tmp_path, save, load):
    want = run_ranks(save_on, save, tmp_path / "c", 3)
    got = run_ranks(load_on, load, tmp_path / "c")
    # AdamW divides by the root of a second moment near 0, which magnifies a gradient's last bit: 1e-9 and not 1e-12
    compare(got, want, 0.0 if save == load else 1e-9)


def one_disk_is_full(rank, world, folder):
    m, optimizer, _ = built(rank, world)
    checkpoints = CheckpointFolder(folder)
    checkpoints.save(1, model=m, optimizer=optimizer, extra={"step": 1}, config={})
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, resource.RLIM_INFINITY))
    with pytest.raises(UserError, match=r"could not be written to .* make room"):
        checkpoints.save(2, model=m, optimizer=optimizer, extra={"step": 2}, config={})
    return checkpoints.load_latest(model=m, optimizer=optimizer)


def test_every_rank_hears_that_one_of_them_could_not_write(tmp_path):
    assert run_ranks(one_disk_is_full, 2, tmp_path) == [{"step": 1}] * 2


def load_another_model(rank, world, folder):
    m, optimizer, _ = built(rank, world)
    m.lm_head.weight = torch.nn.Parameter(m.lm_head.weight[:40].detach())
    with pytest.raises(UserError, match=r"lm_head.weight has shape \[64, 32\] in it and \[40, 32\] in this run"):
        CheckpointFolder(folder).load_latest(model=m, optimizer=optimizer)


def test_every_rank_refuses_another_model(tmp_path):
    run_ranks(save_on, 2, tmp_path, 0)
    run_ranks(load_another_model, 2, tmp_path)


def save_pretrained_on(rank, world, folder):
    m, _, _ = built(rank, world)
    save_pretrained(m, folder)
    dist.barrier()
    return state(m)


def test_a_sharded_model_is_saved_whole(tmp_path):
    parameters = run_ranks(save_pretrained_on, 2, tmp_path)[0]
    assert difference(state(from_pretrained(tmp_path, dtype=torch.float64)), parameters) == 0.0
