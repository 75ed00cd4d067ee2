"""A rank that never comes: the one that waits knows in which collective and layer."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from moetrain.accumulate import Balance
from moetrain.config.run import ParallelConfig
from moetrain.observe import stuck
from moetrain.parallel.plan import spread
from moetrain.parallel.ranks import Ranks, meshes
from tests.support.processes import run_plain
from tests.support.small import V3, model, rank_window, sgd

pytestmark = pytest.mark.dist


def waits(rank, world, folder, ep, layer, backward):
    store = dist.FileStore(str(folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=2))
    m = model()
    spread(m, ParallelConfig(ep=ep), "float64", Ranks(rank, world, torch.device("cpu"), *meshes("cpu", world, ep=ep)))
    accumulator = sgd(m, V3, Balance())
    accumulator.step(rank_window(rank, world))
    if rank == 1:
        place = m.layers[layer].mlp

        def sleep(*_):
            time.sleep(5)

        if backward:
            place.register_full_backward_pre_hook(sleep)
        else:
            place.register_forward_pre_hook(sleep)
    watch = stuck.Watch(m, rank, 100.0)
    try:
        with watch:
            watch.beat(7)
            accumulator.step(rank_window(rank, world))
    except stuck.LostRankError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("ep", "backward", "collective"),
    [(2, False, "all_to_all_single"), (2, True, "all_to_all_single"), (1, False, "all_gather_single")],
)
def test_the_rank_that_waits_names_collective_and_layer(tmp_path, ep, backward, collective):
    said = run_plain(waits, 2, tmp_path, ep, 2, backward)[0]
    # FSDP2 gathers the next block's weights; experts' tokens are waited for where they go
    where = "layers.2.mlp" if ep == 2 else "mtp.0.block"
    assert said.startswith(f"rank 0 lost another one during {collective}") and f" in {where}" in said, said
    assert "after step 7 (" in said and "goes on from its last checkpoint" in said


def test_an_error_of_another_kind_is_left_alone():
    with pytest.raises(RuntimeError, match="^a shape does not fit$"), stuck.Watch(model(), 0, 100.0):
        raise RuntimeError("a shape does not fit")
