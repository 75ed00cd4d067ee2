"""Bytes of a window by kind and layout, from the counter of real runs on this machine: the table in docs/traffic.md."""

from __future__ import annotations

import csv
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from moetrain import load_config
from moetrain.accumulate import MoEAccumulator, Window
from moetrain.config.run import SPLIT_BACKWARD, ParallelConfig
from moetrain.engine.pipeline import Pipeline
from moetrain.model import DeepSeek, DeepSeekLoss
from moetrain.parallel.plan import spread
from moetrain.parallel.ranks import Ranks, meshes

ROOT = Path(__file__).parents[1]
KINDS = ("gradients", "parameters", "experts", "stages")
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "2 ranks, FSDP2": (2, {}),
    "2 ranks, FSDP2, reduced in each micro-batch": (2, {"reduce": "micro_batch"}),
    "2 ranks, FSDP2, not resharded": (2, {"reshard_after_forward": False}),
    "2 ranks, FSDP2, recompute": (2, {"recompute": "full"}),
    "4 ranks, FSDP2, 2 copies": (4, {"dp_replicate": 2}),
    "2 ranks, experts over 2": (2, {"ep": 2}),
    "4 ranks, experts over 4": (4, {"ep": 4}),
    "2 stages, 1F1B": (2, {"pp": 2}),
    "2 x 2 stages, interleaved 1F1B": (2, {"pp": 2, "schedule": "interleaved_1f1b"}),
    "2 x 2 stages, DualPipeV": (2, {"pp": 2, "schedule": "dualpipev"}),
    "2 stages of 2 ranks, 1F1B": (4, {"pp": 2}),
}


def rank_main(rank: int, world: int, keys: dict[str, Any], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    config = load_config(ROOT / "configs" / "671B" / "smoke.yaml").model
    plan = ParallelConfig(**{"reshard_after_forward": keys.get("schedule") not in SPLIT_BACKWARD, **keys})
    spread_over = meshes("cpu", world, dp_replicate=plan.dp_replicate, ep=plan.ep, pp=plan.pp, need_group=plan.pp == 1)
    ranks = Ranks(rank, world, torch.device("cpu"), *spread_over)
    model = DeepSeek(config)
    model.init_weights(0)
    loss = DeepSeekLoss(config)
    spread(model, plan, "fp32", ranks)
    pipeline = Pipeline(model, loss, plan, ranks, dtype=torch.float32) if ranks.pipe is not None else None
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    accumulator = MoEAccumulator(
        model, optimizer, loss=loss, groups=ranks.groups, reduce=plan.reduce, pipeline=pipeline
    )  # fmt: skip
    rows = torch.randint(0, config.vocab_size, (16 // ranks.data_world, 256))
    window = Window({"input_ids": ids, "labels": ids} for ids in rows.split(2))
    traffic = accumulator.step(window).traffic
    if rank == 0:
        torch.save({kind: calls.bytes for kind, calls in traffic.items()}, Path(folder, "found"))
    dist.destroy_process_group()


def main() -> None:
    rows = []
    for name, (world, keys) in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            start_processes(rank_main, (world, keys, folder), nprocs=world, start_method="spawn")
            found = torch.load(Path(folder, "found"))
        rest = sum(size for kind, size in found.items() if kind not in KINDS)
        rows.append({"layout": name, **{kind: found.get(kind, 0) for kind in KINDS}, "everything else": rest})
        print(
            f"| {name} |", " | ".join(f"{value / 2**20:.2f}" for value in list(rows[-1].values())[1:]), "|", flush=True
        )
    with (ROOT / "benchmarks" / "results" / "traffic.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
