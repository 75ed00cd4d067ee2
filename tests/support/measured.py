"""The peak of tensor bytes in a real run, rank by rank."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch

from moetrain.accumulate import MoEAccumulator, Window
from moetrain.config.run import RunConfig
from moetrain.engine import NativeEngine
from moetrain.model import DeepSeekLoss
from moetrain.parallel.plan import needs_group
from moetrain.parallel.ranks import started
from moetrain.planning.layout import Layout
from moetrain.planning.tensors import TensorMemory, training_kinds
from tests.support.processes import run_plain

STEPS = 3  # the first makes moments and buffers, the others are alike


def measured(config: RunConfig, world: int, timeout: float = 240) -> list[dict[str, Any]]:
    """Of each rank: ``peak`` bytes of the later steps, what it is made of, and ``share``: entries its experts got over
    the mean."""
    with tempfile.TemporaryDirectory() as folder:
        return run_plain(_on_rank, world, config, folder, timeout=timeout)


def _on_rank(rank: int, world: int, config: RunConfig, folder: str) -> dict[str, Any]:
    os.environ |= {"WORLD_SIZE": str(world), "RANK": str(rank), "LOCAL_WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
    p = config.parallel
    import torch.distributed as dist

    if world > 1 or needs_group(config.precision, p):
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    from moetrain.parallel.ranks import Ranks, meshes

    grouped = world > 1 or needs_group(config.precision, p)
    spread = meshes("cpu", world, dp_replicate=p.dp_replicate, ep=p.ep, pp=p.pp, need_group=needs_group(config.precision, p)) if grouped else (None,)
    ranks = Ranks(rank, world, torch.device("cpu"), *spread)
    layout = Layout(config, world, "cpu")
    loss = DeepSeekLoss(config.model)
    engine = NativeEngine(config, ranks, loss)
    accumulator = MoEAccumulator(
        engine.model,
        engine.optimizer,
        loss=loss,
        balance=layout.balance,
        max_norm=1.0,
        groups=ranks.groups,
        window_order="counting_pass" if layout.counting_pass else "forwards_first",
        device=ranks.device,
        pipeline=engine.pipeline,
        owner=engine.owner,
    )
    memory = TensorMemory(training_kinds(engine.model, engine.optimizer))
    torch.manual_seed(ranks.data_rank)
    sent = []
    from moetrain.parallel import ep
    class T(ep.Trip):
        def __init__(self, d, rows, entries):
            super().__init__(d, rows, entries)
            sent.append((d.layer, sum(rows[0]), sum(rows[1]), sum(entries[0]), sum(entries[1])))
    ep.Trip = T
    count = -(-config.batch.global_batch // ranks.data_world)
    slots = -(-count // config.batch.micro_batch)
    size = min(config.batch.micro_batch, count)
    report = None
    with memory:
        memory.kinds = {}  # what was there has been counted
        for step in range(STEPS):
            rows = torch.randint(0, config.model.vocab_size, (slots * size, config.data.seq_len))
            window = Window({"input_ids": ids.clone(), "labels": ids.clone()} for ids in rows.split(size))
            del rows
            if step == 1:
                memory.reset_peak()
            del report
            report = accumulator.step(window)
            del window
    load = report.load.double()  # [L, E]
    own = load.view(load.shape[0], p.ep, -1).sum(2)
    share = (own / own.mean(1, keepdim=True))[:, (rank % ranks.data_world) % p.ep]
    result = {"peak": memory.peak, "share": float(share.mean()) if len(share) else 1.0, "sent": sent}
    if dist.is_initialized():
        dist.destroy_process_group()
    return result
