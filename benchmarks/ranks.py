"""Training step on two processes against transformers under DDP, FSDP2 and DeepSpeed ZeRO: tokens/s and peak memory.

    python benchmarks/ranks.py --shape small --rounds 5

``--rows 8`` takes the same step in half as many micro-batches. As in step.py, each side lives in processes of its own
(two of them here, over gloo, one thread each), steps only when it is its turn, and ratios are taken round by round.
Meanwhile the other sides' processes are stopped: their threads of gloo wake a hundred times a second each, on the two
cores that the side in question has. Every rank has its own micro-batches; the losses of the first step are compared
before anything is timed. DeepSpeed's sides need deepspeed and take part only where it is installed.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import multiprocessing as mp
import os
import platform
import resource
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from step import ADAMW, COMMON, ROWS, SHAPES, TOKENS, WINDOW, batches, in_turn, saved

RANKS = 2
#: loss of a step, given the rank's micro-batches
Step = Callable[[Sequence[Any]], float]
#: given the folder of weights, rows of a micro-batch and the rank
Build = Callable[[str, int, int], Step]


def own_batches(i: int, vocabulary: int, rank: int, rows: int) -> tuple[Any, ...]:
    """A rank's part of step i in micro-batches of ``rows``: the same tokens for every size."""
    import torch

    return torch.cat(batches(i * RANKS + rank, vocabulary)).split(rows)


def moetrain(how: str) -> Build:
    def build(folder: str, rows: int, rank: int) -> Step:
        import torch

        from moetrain import MoEAccumulator, Window, from_pretrained, reuse_host_memory
        from moetrain.config.run import ParallelConfig
        from moetrain.model import DeepSeekLoss
        from moetrain.parallel.plan import spread
        from moetrain.parallel.ranks import Ranks, meshes

        reuse_host_memory()  # as the trainer does on CPU
        model = from_pretrained(folder)
        if how == "replicated":
            model.set_in_place_gradients(True)
        else:
            plan = ParallelConfig(ep=1 if how == "fsdp" else 2, reshard_after_forward=how != "experts, kept")
            ranks = Ranks(rank, RANKS, torch.device("cpu"), *meshes("cpu", RANKS, ep=plan.ep))
            spread(model, plan, "fp32", ranks)
        optimizer = torch.optim.AdamW(groups_of(model), **ADAMW)
        accumulator = MoEAccumulator(model, optimizer, loss=DeepSeekLoss(model.config), max_norm=1.0)

        def step(own: Sequence[Any]) -> float:
            window = Window({"input_ids": x, "labels": x} for x in own)
            return float(accumulator.step(window).total)

        return step

    return build


def groups_of(model: Any) -> Any:
    """torch's fused step takes parameters of one mesh at a time."""
    meshes: dict[Any, list[Any]] = {}
    for p in model.parameters():
        meshes.setdefault(getattr(p, "device_mesh", None), []).append(p)
    return [{"params": params} for params in meshes.values()]


def theirs(folder: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation="grouped_mm"
    )
    model.config.use_cache = False
    return model.train()


def transformers(how: str) -> Build:
    """The usual loops: mean losses divided by the number of micro-batches, gradients synchronised in the last one."""

    def build(folder: str, rows: int, rank: int) -> Step:
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel

        model = theirs(folder)
        if how == "ddp":
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        else:
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

        def step(own: Sequence[Any]) -> float:
            total = torch.zeros(())
            for m, x in enumerate(own):
                last = m == len(own) - 1
                if how == "ddp":
                    model.require_backward_grad_sync = last
                else:
                    model.set_requires_gradient_sync(last)
                loss = model(input_ids=x, labels=x).loss / len(own)
                loss.backward()
                total += loss.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            dist.all_reduce(total)
            return float(total) / RANKS

        return step

    return build


def deepspeed_zero(stage: int) -> Build:
    def build(folder: str, rows: int, rank: int) -> Step:
        import deepspeed
        import torch
        import torch.distributed as dist

        deepspeed.init_distributed(dist_backend="gloo")
        model = theirs(folder)
        adamw = {**ADAMW, "betas": list(ADAMW["betas"])}
        adamw.pop("fused")
        config = {
            "train_micro_batch_size_per_gpu": rows,
            "gradient_accumulation_steps": WINDOW * ROWS // rows,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "AdamW", "params": {**adamw, "torch_adam": True}},
            "steps_per_print": 10**9,
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

        def step(own: Sequence[Any]) -> float:
            total = torch.zeros(())
            for x in own:
                loss = engine(input_ids=x, labels=x).loss
                engine.backward(loss)
                engine.step()
                total += loss.detach() / len(own)
            dist.all_reduce(total)
            return float(total) / RANKS

        return step

    return build


SIDES: dict[str, Build] = {
    "moetrain, replicated": moetrain("replicated"),
    "moetrain, FSDP2": moetrain("fsdp"),
    "moetrain, FSDP2, experts over 2": moetrain("experts"),
    "moetrain, FSDP2, experts over 2, the rest kept": moetrain("experts, kept"),
    "transformers, DDP": transformers("ddp"),
    "transformers, FSDP2": transformers("fsdp"),
    "transformers, ZeRO-1": deepspeed_zero(1),
    "transformers, ZeRO-2": deepspeed_zero(2),
    "transformers, ZeRO-3": deepspeed_zero(3),
}


def worker(side: str, folder: str, vocabulary: int, rows: int, rank: int, port: int, pipe: Connection) -> None:
    """Steps when told to; answers (loss, seconds, peak resident MiB)."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu",
    }  # fmt: skip
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    step = SIDES[side](folder, rows, rank)
    pipe.send("ready")
    while (i := pipe.recv()) is not None:
        own = own_batches(i, vocabulary, rank, rows)
        dist.barrier()
        start = time.perf_counter()
        loss = step(own)
        seconds = time.perf_counter() - start
        pipe.send((loss, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def measure(shape: str, sides: list[str], rounds: int, rows: int) -> list[dict[str, Any]]:
    import torch

    from moetrain.config.model import ModelConfig

    config = ModelConfig(**COMMON, **SHAPES[shape])
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        saved(config, folder)
        pipes: dict[str, list[Connection]] = {}
        processes: dict[str, list[Any]] = {}

        def tell(side: str, what: signal.Signals) -> None:
            for process in processes[side]:
                os.kill(process.pid, what)

        @contextmanager
        def turn(side: str) -> Iterator[None]:
            tell(side, signal.SIGCONT)
            yield
            tell(side, signal.SIGSTOP)

        try:
            for number, side in enumerate(sides):
                pipes[side], processes[side] = [], []
                for rank in range(RANKS):
                    ours, their = context.Pipe()
                    arguments = (side, folder, config.vocab_size, rows, rank, 29870 + number, their)
                    process = context.Process(target=worker, args=arguments, daemon=True)
                    process.start()
                    pipes[side].append(ours)
                    processes[side].append(process)
                assert all(pipe.recv() == "ready" for pipe in pipes[side])
                tell(side, signal.SIGSTOP)
            seconds, peak = in_turn(pipes, rounds, turn)
        finally:  # what is stopped cannot end
            for side in processes:
                tell(side, signal.SIGCONT)
        for process in (process for side in sides for process in processes[side]):
            process.join(20)
    tokens = RANKS * WINDOW * ROWS * TOKENS
    best = sides[0]
    found = []
    for side in sides:
        ratio = statistics.median(a / b for a, b in zip(seconds[side], seconds[best], strict=True))
        found.append(
            {
                "shape": shape,
                "rows": rows,
                "side": side,
                "tokens_per_s": round(tokens / statistics.median(seconds[side])),
                f"time over {best}": round(ratio, 3),
                "peak_mib_per_process": round(peak[side]),
                "rounds": rounds,
                "torch": torch.__version__,
                "machine": platform.machine(),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["tiny", "small"], choices=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=ROWS, choices=(1, 2, 4, 8, 16), help="of a micro-batch")
    parser.add_argument("--sides", nargs="+", default=None, help="default: all that are installed")
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "ranks-cpu.csv")
    given = parser.parse_args()
    installed = importlib.util.find_spec("deepspeed") is not None
    sides = given.sides or [side for side in SIDES if installed or "ZeRO" not in side]
    rows = []
    for shape in given.shape:
        for row in measure(shape, sides, given.rounds, given.rows):
            print("  ".join(f"{value}" for value in row.values()), flush=True)
            rows.append(row)
    with given.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
