"""A rank that never comes: the one that waits knows in which collective and layer."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import socket
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from moetrain.accumulate import Balance
from moetrain.config.run import ParallelConfig
from moetrain.observe import stuck
from moetrain.parallel.plan import spread
from moetrain.parallel.ranks import Ranks, meshes, started
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
    watch = stuck.Watch(rank, 100.0)
    watch.model = m
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


def waits_for_one_that_ended(rank, port, said):
    """Rank 1 has an error and its process stays; rank 0 is in a collective, where no signal reaches Python."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.dup2(os.open(f"{said}.{rank}", os.O_WRONLY | os.O_CREAT), 2)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    stuck.GRACE = 0.5
    try:
        with started("cpu") as ranks, stuck.Watch(rank, 100.0, ranks.ended):
            if rank == 1:
                raise ValueError("somebody's loader")
            signal.signal(signal.SIGTERM, lambda *_: None)
            dist.all_reduce(torch.zeros(1))
    finally:
        time.sleep(60)


def test_a_rank_whose_peer_has_an_error_does_not_wait_for_it(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("fork")
    ranks = [
        context.Process(target=waits_for_one_that_ended, args=(r, port, tmp_path / "said"), daemon=True)
        for r in range(2)
    ]
    for process in ranks:
        process.start()
    ranks[0].join(20)
    assert ranks[0].exitcode == 1 and ranks[1].is_alive()
    for process in ranks:
        process.kill()
        process.join()
    said = Path(tmp_path / "said.0").read_text()
    assert said == "moetrain: rank 0 ends, since rank 1 ended with ValueError: somebody's loader\n"


def test_an_error_of_another_kind_is_left_alone():
    with pytest.raises(RuntimeError, match="^a shape does not fit$"), stuck.Watch(0, 100.0):
        raise RuntimeError("a shape does not fit")
