"""What the accumulation core costs beside a bare loop over the same model, and what scope ``window`` costs.

    python benchmarks/accumulate.py --shapes tiny small --rounds 15

All sides live in one process with models of their own and step in turn, in another order every round; ratios are taken
round by round. The bare loop is the least that trains: summed loss over a known number of tokens, backward, torch's
clip, optimizer step. fp32, CPU, fused AdamW, windows of 4 micro-batches of 4 x 256 tokens, as in ``step.py``.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from step import ADAMW, COMMON, ROWS, SHAPES, TOKENS, WINDOW, batches

from moetrain import Balance, MoEAccumulator, Window, reuse_host_memory
from moetrain.config.model import ModelConfig
from moetrain.model import DeepSeek, DeepSeekLoss
from moetrain.parallel.recompute import recompute_in_backward

Step = Callable[[int], float]


def built(config: ModelConfig, *, recompute: bool = False) -> tuple[DeepSeek, torch.optim.Optimizer]:
    model = DeepSeek(config)
    model.init_weights(0)
    model.set_in_place_gradients(True)
    if recompute:
        for block in model.layers:
            recompute_in_backward(block)
    return model, torch.optim.AdamW(model.parameters(), **ADAMW)


def bare(config: ModelConfig) -> Step:
    model, optimizer = built(config)
    scale = 1.0 / (WINDOW * ROWS * (TOKENS - 1))

    def step(i: int) -> float:
        total = 0.0
        for x in batches(i, config.vocab_size):
            targets = torch.full_like(x, -100)
            targets[:, :-1] = x[:, 1:]
            loss = model(x, targets=targets.unsqueeze(0))[0] * scale
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def core(config: ModelConfig, balance: Balance | None = None, *, recompute: bool = False, **kwargs: Any) -> Step:
    model, optimizer = built(config, recompute=recompute)
    accumulator = MoEAccumulator(model, optimizer, loss=DeepSeekLoss(config), balance=balance, max_norm=1.0, **kwargs)

    def step(i: int) -> float:
        window = Window({"input_ids": x, "labels": x} for x in batches(i, config.vocab_size))
        return float(accumulator.step(window).losses["lm"])

    return step


def sides(config: ModelConfig) -> dict[str, Callable[[], Step]]:
    def with_bias(scope: str) -> Balance:
        return Balance(scope=scope, alpha=1e-4, bias_rate=1e-3)  # type: ignore[arg-type]

    again = partial(core, config, recompute=True)
    return {
        "bare loop": partial(bare, config),
        "core, no balance": partial(core, config),
        "core, sequence and bias": partial(core, config, with_bias("sequence")),
        "recompute, sequence": partial(again, with_bias("sequence")),
        "recompute, window by forwards first": partial(again, with_bias("window")),
        "recompute, window by a counting pass": partial(again, with_bias("window"), window_order="counting_pass"),
    }


#: side -> what its time is divided by
AGAINST = {
    "core, no balance": "bare loop",
    "core, sequence and bias": "bare loop",
    "recompute, window by forwards first": "recompute, sequence",
    "recompute, window by a counting pass": "recompute, sequence",
}


def measure(shape: str, rounds: int, recompute: bool) -> list[dict[str, Any]]:
    every = sides(ModelConfig(**COMMON, **SHAPES[shape]))
    steps = {side: build() for side, build in every.items() if recompute or not side.startswith("recompute")}
    order = list(steps)
    seconds: dict[str, list[float]] = {side: [] for side in steps}
    for i in range(rounds + 2):
        random.Random(i).shuffle(order)
        losses = {}
        for side in order:
            start = time.perf_counter()
            losses[side] = steps[side](i)
            if i >= 2:  # two warm-up rounds
                seconds[side].append(time.perf_counter() - start)
        if i == 0 and max(losses.values()) - min(losses.values()) > 1e-5 * max(losses.values()):
            raise SystemExit(f"not the same model: first losses {losses}")
    rows = []
    for side, other in AGAINST.items():
        if side not in steps:
            continue
        ratios = sorted(a / b for a, b in zip(seconds[side], seconds[other], strict=True))
        quarter = len(ratios) // 4
        rows.append(
            {
                "shape": shape,
                "side": side,
                "against": other,
                "time_ratio": round(statistics.median(ratios), 3),
                "from": round(ratios[quarter], 3),
                "to": round(ratios[-1 - quarter], 3),
                "seconds": round(statistics.median(seconds[side]), 3),
                "rounds": rounds,
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["tiny", "small"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--no-recompute", action="store_true", help="half the sides: wide-experts needs the memory")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "accumulate-cpu.csv")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    reuse_host_memory()
    rows = []
    for shape in given.shapes:
        found = measure(shape, given.rounds, not given.no_recompute)
        rows += found
        for row in found:
            print(
                f"{shape:>13}  {row['side']:<38} {row['time_ratio']:.3f} of {row['against']:<20} "
                f"(middle half {row['from']:.3f} to {row['to']:.3f})",
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
