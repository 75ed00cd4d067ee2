"""Predicted peak against measured peak of real runs on this machine: the table in docs/plan.md.

    PYTHONPATH=. python benchmarks/plan.py [NUMBER OF A RUN ...]

Each run is three optimizer steps of the model of configs/671B/smoke.yaml on gloo; measured are tensor bytes of the
later two (``moetrain.planning.tensors``), on every rank; the row shows the rank on which the prediction is worst. Where
experts are spread, the prediction is told how many entries each rank's experts got: that is data, and not the plan's.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from moetrain.config import load_config
from tests.support.measured import predicted_and_measured

ROOT = Path(__file__).parents[1]
BASE = ["data.seq_len=128", "batch={global_batch: 16, micro_batch: 2}"]
P = "parallel."
BUCKET = "deepspeed.bucket=100000"  # the default is larger than this model


def zero(stage: int, *keys: str) -> list[str]:
    return ["engine=deepspeed", f"deepspeed.zero_stage={stage}", BUCKET, *keys]


RUNS: list[tuple[int, list[str]]] = [
    (1, []),
    (1, [f"{P}recompute=selective"]),
    (1, [f"{P}recompute=full"]),
    (1, ["balance.scope=window"]),
    (1, ["balance.scope=window", f"{P}recompute=full"]),
    (1, ["balance.scope=window", "balance.window_order=counting_pass"]),
    (1, ["precision=bf16"]),
    (1, ["precision=fp8"]),
    (1, ["optimizer.moments=bf16", f"{P}recompute=full"]),
    (2, []),
    (2, [f"{P}reduce=micro_batch"]),
    (2, [f"{P}reshard_after_forward=false"]),
    (2, [f"{P}recompute=full"]),
    (2, [f"{P}ep=2"]),
    (2, [f"{P}pp=2"]),
    (2, [f"{P}pp=2", f"{P}schedule=gpipe"]),
    (2, [f"{P}pp=2", f"{P}schedule=interleaved_1f1b"]),
    (2, ["precision=bf16"]),
    (2, ["precision=fp8", f"{P}recompute=selective"]),
    (2, ["precision=fp8", f"{P}ep=2"]),
    (4, [f"{P}dp_replicate=2"]),
    (4, [f"{P}ep=4", f"{P}recompute=full"]),
    (4, [f"{P}pp=2", f"{P}ep=2", f"{P}recompute=selective"]),
    (4, ["precision=bf16", f"{P}ep=2", f"{P}reduce=micro_batch"]),
    (8, []),
    (8, [f"{P}pp=2", f"{P}ep=2", f"{P}recompute=full"]),
    (1, zero(3)),
    (2, zero(1)),
    (2, zero(2)),
    (2, zero(3)),
    (2, zero(3, f"{P}recompute=full")),
    (2, zero(2, "precision=bf16")),
    (2, zero(3, "precision=bf16")),
    (2, zero(2, f"{P}ep=2")),
    (2, zero(2, "deepspeed.offload_optimizer=cpu")),
    (2, zero(3, "deepspeed.offload_optimizer=cpu", "deepspeed.offload_parameters=cpu")),
    (4, zero(2)),
    (4, zero(3)),
]


def main() -> None:
    rows = []
    for world, keys in RUNS if len(sys.argv) == 1 else [RUNS[int(i)] for i in sys.argv[1:]]:
        config = load_config(ROOT / "configs" / "671B" / "smoke.yaml", [*BASE, *keys])
        predicted, seen = predicted_and_measured(config, world)
        shown = [key.removeprefix(P).removeprefix("balance.") for key in keys if key != BUCKET]
        name = ", ".join(shown).replace("engine=deepspeed, deepspeed.zero_stage=", "ZeRO ") or "defaults"
        off = f"{100 * (predicted / seen - 1):+.2f}"
        mib = [f"{size / 2**20:.2f}" for size in (predicted, seen)]
        rows.append({"ranks": world, "run": name, "predicted_mib": mib[0], "measured_mib": mib[1], "percent": off})
        print(f"| {world} | {name} | {' | '.join(mib)} | {off} |", flush=True)
    if len(sys.argv) > 1:
        return
    with (ROOT / "benchmarks" / "results" / "plan.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
