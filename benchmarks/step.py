"""Training step against transformers: tokens/s and peak memory, the same weights, the same batches, in turn.

    python benchmarks/step.py --shapes tiny small wide-experts --rounds 6

Each side lives in a process of its own (so that peak memory is its own) and steps only when it is its turn; a round is
one step of each, and the ratio is taken round by round, so a machine whose speed drifts cannot favour either. Both
load one folder in the released format; the losses of the first step are compared before anything is timed. fp32, CPU,
AdamW (fused), clipping at 1.0, windows of 4 micro-batches of 4 x 256 tokens.
"""

from __future__ import annotations

import argparse
import csv
import multiprocessing as mp
import os
import platform
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROWS, TOKENS, WINDOW = 4, 256, 4
ADAMW: dict[str, Any] = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "fused": True}

COMMON: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "max_position_embeddings": TOKENS,
    "initializer_range": 0.02,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "vocab_size": 4096, "hidden_size": 128, "intermediate_size": 384, "moe_intermediate_size": 128,
        "num_hidden_layers": 4, "num_attention_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 32,
        "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 4, "topk_group": 2,
    },
    "small": {
        "vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "moe_intermediate_size": 256,
        "num_hidden_layers": 6, "num_attention_heads": 8, "q_lora_rank": 128, "kv_lora_rank": 64,
        "n_routed_experts": 32, "n_shared_experts": 2, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2,
    },
    "wide-experts": {
        "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1536, "moe_intermediate_size": 160,
        "num_hidden_layers": 10, "num_attention_heads": 8, "q_lora_rank": 192, "kv_lora_rank": 96,
        "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 4,
    },
}  # fmt: skip


def batches(step: int, vocabulary: int) -> list[Any]:
    """The window of a step: the same for everyone."""
    import torch

    generator = torch.Generator().manual_seed(step)
    return [torch.randint(0, vocabulary, (ROWS, TOKENS), generator=generator) for _ in range(WINDOW)]


def moetrain_step(folder: str, vocabulary: int) -> Callable[[int], float]:
    import torch

    from moetrain import MoEAccumulator, Window, from_pretrained, reuse_host_memory
    from moetrain.model import DeepSeekLoss

    reuse_host_memory()  # as the trainer does on CPU
    model = from_pretrained(folder)
    model.set_in_place_gradients(True)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    accumulator = MoEAccumulator(model, optimizer, loss=DeepSeekLoss(model.config), max_norm=1.0)

    def step(i: int) -> float:
        window = Window({"input_ids": x, "labels": x} for x in batches(i, vocabulary))
        return float(accumulator.step(window).total)

    return step


def transformers_step(experts: str, *, reuse: bool = False) -> Callable[[str, int], Callable[[int], float]]:
    """The plain loop of transformers' users: mean losses, divided by the number of micro-batches."""

    def build(folder: str, vocabulary: int) -> Callable[[int], float]:
        import torch
        from transformers import AutoModelForCausalLM

        if reuse:
            from moetrain import reuse_host_memory

            reuse_host_memory()
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", experts_implementation=experts
        )
        model.config.use_cache = False
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

        def step(i: int) -> float:
            total = 0.0
            for x in batches(i, vocabulary):
                loss = model(input_ids=x, labels=x).loss / WINDOW
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return total

        return step

    return build


SIDES: dict[str, Callable[[str, int], Callable[[int], float]]] = {
    "moetrain": moetrain_step,
    "transformers grouped_mm": transformers_step("grouped_mm"),
    "transformers eager": transformers_step("eager"),
    "transformers grouped_mm, our allocator setting": transformers_step("grouped_mm", reuse=True),
}


def worker(side: str, folder: str, vocabulary: int, threads: int, pipe: Connection) -> None:
    """Steps when told to; answers (loss, seconds, peak resident MiB)."""
    import torch

    torch.set_num_threads(threads)
    step = SIDES[side](folder, vocabulary)
    pipe.send("ready")
    while (i := pipe.recv()) is not None:
        start = time.perf_counter()
        loss = step(i)
        seconds = time.perf_counter() - start
        pipe.send((loss, seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def saved(config: Any, folder: str) -> None:
    """Weights for everyone, in the released format."""
    from moetrain import save_pretrained
    from moetrain.model import DeepSeek

    model = DeepSeek(config)
    model.init_weights(0)
    save_pretrained(model, folder)


def in_turn(
    pipes: dict[str, list[Connection]],
    rounds: int,
    turn: Callable[[str], AbstractContextManager[None]] = lambda side: nullcontext(),
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """One step of each side a round, whose processes answer (loss, seconds, peak MiB); two rounds warm up.

    Args:
        turn: entered for a side that steps.

    Returns:
        seconds by side and round, and peaks by side: of its slowest, and of its largest process.
    """
    seconds: dict[str, list[float]] = {side: [] for side in pipes}
    peak: dict[str, float] = {}
    for i in range(rounds + 2):
        losses = {}
        for side, processes in pipes.items():
            with turn(side):
                for pipe in processes:
                    pipe.send(i)
                answers = [pipe.recv() for pipe in processes]
            losses[side], peak[side] = answers[0][0], max(answer[2] for answer in answers)
            if i >= 2:
                seconds[side].append(max(answer[1] for answer in answers))
        if i == 0 and max(losses.values()) - min(losses.values()) > 1e-4 * max(losses.values()):
            raise SystemExit(f"not the same model: first losses {losses}")
    for processes in pipes.values():
        for pipe in processes:
            pipe.send(None)
    return seconds, peak


def measure(shape: str, sides: list[str], rounds: int, threads: int) -> list[dict[str, Any]]:
    import torch

    from moetrain.config.model import ModelConfig

    config = ModelConfig(**COMMON, **SHAPES[shape])
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        saved(config, folder)
        pipes, processes = {}, []
        for side in sides:
            ours, theirs = context.Pipe()
            process = context.Process(target=worker, args=(side, folder, config.vocab_size, threads, theirs))
            process.start()
            pipes[side] = [ours]
            processes.append(process)
            assert ours.recv() == "ready"
        seconds, peak = in_turn(pipes, rounds)
        for process in processes:
            process.join()
    tokens = ROWS * TOKENS * WINDOW
    own = seconds["moetrain"]
    return [
        {
            "shape": shape,
            "side": side,
            "tokens_per_s": round(tokens / statistics.median(seconds[side])),
            "moetrain_is_faster_by": round(
                statistics.median(t / o for t, o in zip(seconds[side], own, strict=True)), 3
            ),
            "peak_mib": round(peak[side]),
            "rounds": rounds,
            "threads": threads,
            "torch": torch.__version__,
        }
        for side in sides
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["tiny", "small"])
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=["moetrain", "transformers grouped_mm"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "step-cpu.csv")
    given = parser.parse_args()
    sides = list(dict.fromkeys(["moetrain", *given.sides]))
    rows = []
    for shape in given.shapes:
        found = measure(shape, sides, given.rounds, given.threads)
        rows += found
        for row in found:
            print(
                f"{row['shape']:>13}  {row['side']:<46} {row['tokens_per_s']:>7,} tokens/s   "
                f"time / moetrain's {row['moetrain_is_faster_by']:.2f}   peak {row['peak_mib']:>6,} MiB",
                flush=True,
            )
    given.csv.parent.mkdir(parents=True, exist_ok=True)
    with given.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=[*rows[0], "machine"])
        writer.writeheader()
        writer.writerows({**row, "machine": platform.processor() or platform.machine()} for row in rows)
    print(f"written to {given.csv}")


if __name__ == "__main__":
    main()
