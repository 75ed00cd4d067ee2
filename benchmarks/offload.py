"""Native, accumulation, offload, both together, and both with states on a drive: memory, speed and loss of the same
global batch.

    python benchmarks/offload.py                       # the table, in about ten minutes on two cores
    python benchmarks/offload.py --layers 4 --steps 2  # smaller

Each row is a process of its own with one rank. Every row takes the same steps on the same sequences, so losses are
equal up to fp32's rounding. Device memory is what would live on a GPU: the peak of all tensors that are alive
(``moetrain.planning.tensors``) without what the row keeps on the host. Then the largest micro-batch is looked for whose
device memory stays within the native row's, and its speed is measured.

On a CPU there is no bus between device and host and both compute: speeds say what larger products gain, and nothing of
what transfers cost.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HOST = ("deepspeed.offload_optimizer=cpu", "deepspeed.offload_parameters=cpu", "deepspeed.small_parameter=0")
ZERO = (
    "engine=deepspeed",
    "deepspeed.zero_stage=3",
    "deepspeed.bucket=20000000",
    "deepspeed.sub_group=50000000",
    *HOST,
)
DRIVE = ("deepspeed.offload_optimizer=nvme", "deepspeed.offload_parameters=nvme")
#: name -> (micro-batches in the window, what is configured)
ROWS: dict[str, tuple[int, tuple[str, ...]]] = {
    "native": (1, ()),
    "accumulation over 4": (4, ()),
    "ZeRO offload": (1, ZERO),
    "both": (4, ZERO),
    "both, on a drive": (4, (*ZERO, *DRIVE)),
}


def overrides(given: argparse.Namespace, folder: str, micro_batch: int, more: tuple[str, ...]) -> list[str]:
    return [
        f"model.hidden_size={given.width}", f"model.intermediate_size={4 * given.width}",
        f"model.moe_intermediate_size={given.width}", f"model.num_hidden_layers={given.layers}",
        f"model.n_routed_experts={given.experts}", "model.num_nextn_predict_layers=0",
        f"data.seq_len={given.length}", f"batch.global_batch={given.batch}", f"batch.micro_batch={micro_batch}",
        "precision=fp32", "device=cpu", "schedule={kind: constant}", "steps=1000", f"run_dir={folder}/run",
        f"deepspeed.nvme_path={folder}/drive", *more,
    ]  # fmt: skip


def work(given: argparse.Namespace, folder: str) -> None:
    """One row: steps, and what they took, as JSON."""
    import torch
    import torch.distributed as dist

    from moetrain import load_config
    from moetrain.accumulate import MoEAccumulator, Window
    from moetrain.data import GlobalBatches, build_data
    from moetrain.engine import DeepSpeedEngine, Engine, NativeEngine, reuse_host_memory
    from moetrain.model import DeepSeekLoss
    from moetrain.parallel.ranks import Ranks, meshes
    from moetrain.planning.tensors import TensorMemory

    reuse_host_memory()
    torch.set_num_threads(given.threads)
    keys = overrides(given, folder, given.micro_batch, ROWS[given.work][1])
    config = load_config(ROOT / "configs" / "671B" / "smoke.yaml", keys)
    data = build_data(config.data, vocab_size=config.model.vocab_size, seed=config.seed)
    loss = DeepSeekLoss(config.model)
    zero = config.engine == "deepspeed"
    ranks = Ranks(0, 1, torch.device("cpu"), None)
    if zero:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        ranks = Ranks(0, 1, torch.device("cpu"), *meshes("cpu", 1))
    engine: Engine = DeepSpeedEngine(config, ranks) if zero else NativeEngine(config, ranks, loss)
    before_step: list[tuple[int, int]] = []  # peak so far, and what of it lies on the host

    def measure(_: float) -> None:
        if memory is not None:
            before_step.append((memory.peak, memory.by_kind()["host"]))

    memory: TensorMemory | None = None
    accumulator = MoEAccumulator(
        engine.model, engine.optimizer, loss=loss, max_norm=config.optimizer.max_norm, groups=ranks.groups,
        owner=engine.owner, skip_if=measure,
    )  # fmt: skip
    batches = GlobalBatches(data.train, seed=config.seed)
    windows = [
        Window(batches.window(s * given.batch, given.batch, rank=0, world=1, micro_batch=given.micro_batch))
        for s in range(given.steps)
    ]
    made = {
        "model": lambda: (*engine.model.parameters(), *engine.model.buffers()),
        "optimizer": lambda: (x for s in engine.optimizer.state.values() for x in s.values() if torch.is_tensor(x)),
        "host": lambda: on_host(engine) if zero else (),
    }
    kinds: Any = {name: made[name] for name in ("host", "model", "optimizer")} if zero else made
    reports = []
    memory = TensorMemory(kinds)
    with memory:
        for window in windows[: given.measured]:
            memory.reset_peak()
            reports.append(accumulator.step(window))
        device, host = memory.peak, 0
        if zero and before_step:  # weights are stepped on the host, so the device's peak is before that
            peak, host = before_step[-1]
            device = peak - host
    memory = None
    seconds = []
    for window in windows[given.measured :]:
        start = time.perf_counter()
        reports.append(accumulator.step(window))
        seconds.append(time.perf_counter() - start)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    drive = sum(file.stat().st_size for file in Path(folder, "drive").rglob("*") if file.is_file())
    parameters = sum(getattr(p, "ds_numel", p.numel()) for p in engine.model.parameters())
    print(json.dumps({
        "parameters": parameters, "device_bytes": device, "host_bytes": host, "drive_bytes": drive,
        "resident_bytes": resident,
        "tokens_per_s": given.batch * given.length / sorted(seconds)[len(seconds) // 2] if seconds else None,
        "loss": float(reports[-1].total),
    }))  # fmt: skip


def on_host(engine: Any) -> Iterator[Any]:
    """What ZeRO 3 with everything offloaded keeps on the host: parts of weights, masters, gradients, moments, and
    buffers between them and a drive."""
    zero = engine.optimizer
    parameters = list(engine.model.parameters())
    yield from (p.ds_tensor for p in parameters)
    if zero.optimizer_swapper is not None:
        yield from zero.optimizer_swapper.swap_buffer_manager.all_buffers
        swapper = parameters[0].nvme_swapper
        yield swapper.buffers
        if swapper.partitioned_swap_buffer is not None:
            yield swapper.partitioned_swap_buffer
    yield from (flat for flat in zero.fp16_partitioned_groups_flat if flat is not None)
    for flat in zero.fp32_partitioned_groups_flat:
        yield flat
        yield flat.grad
        yield from (x for x in zero.optimizer.state.get(flat, {}).values() if hasattr(x, "untyped_storage"))
    yield zero.grad_partitions_flat_buffer


def row(
    given: argparse.Namespace, name: str, micro_batch: int, *, steps: int, measured: int, batch: int
) -> dict[str, Any]:
    command = [sys.executable, __file__, "--work", name, "--micro-batch", str(micro_batch), "--batch", str(batch)]
    for key in ("width", "layers", "experts", "length", "threads"):
        command += [f"--{key}", str(getattr(given, key))]
    command += ["--steps", str(steps), "--measured", str(measured)]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}, micro-batch {micro_batch}:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    print(f"{name}, micro-batch {micro_batch}: {result}", file=sys.stderr)
    return result


def largest(given: argparse.Namespace, name: str, limit: int) -> int:
    """The largest power of two whose device memory is within ``limit``, up to 8 times the native micro-batch."""
    size = 0
    trial = given.batch // ROWS[name][0]
    while trial <= 8 * given.batch:
        if row(given, name, trial, steps=2, measured=2, batch=trial)["device_bytes"] > limit:
            break
        size, trial = trial, 2 * trial
    return size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for key, value in {
        "width": 256, "layers": 6, "experts": 16, "length": 256, "batch": 16, "steps": 5, "measured": 2, "threads": 2,
    }.items():  # fmt: skip
        parser.add_argument(f"--{key}", type=int, default=value)
    parser.add_argument("--micro-batch", type=int)
    parser.add_argument("--work", choices=tuple(ROWS), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "offload-cpu.csv")
    given = parser.parse_args()
    if given.work:
        with tempfile.TemporaryDirectory() as folder:
            work(given, folder)
        return
    table = []
    limit = None
    for name, (pieces, _) in ROWS.items():
        same = row(given, name, given.batch // pieces, steps=given.steps, measured=given.measured, batch=given.batch)
        limit = limit or same["device_bytes"]
        most = given.batch if name == "native" else largest(given, name, limit)
        # the same number of tokens a step and of micro-batches in it as they come with the largest micro-batch
        grown = (
            same if most == given.batch // pieces else row(given, name, most, steps=3, measured=0, batch=most * pieces)
        )
        table.append({
            "row": name, "parameters": same["parameters"], "micro_batch": given.batch // pieces,
            "device_MiB": same["device_bytes"] >> 20, "host_MiB": same["host_bytes"] >> 20,
            "drive_MiB": same["drive_bytes"] >> 20,
            "resident_MiB": same["resident_bytes"] >> 20, "of_native": round(same["device_bytes"] / limit, 3),
            "tokens_per_s": round(same["tokens_per_s"], 1), f"loss_after_{given.steps}": same["loss"],
            "largest_micro_batch": most, "tokens_per_s_then": round(grown["tokens_per_s"], 1),
        })  # fmt: skip
    with given.out.open("w", newline="") as out:
        writer = csv.DictWriter(out, fieldnames=list(table[0]))
        writer.writeheader()
        writer.writerows(table)
    print(given.out.read_text())


if __name__ == "__main__":
    main()
