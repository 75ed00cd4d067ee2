"""FP8 (reference) against fp32 from the same start on the same text: the relative difference of smoothed losses.

    python benchmarks/fp8_curve.py --steps 500

The model of configs/671B/smoke.yaml made wider than a tile (256, 384, 160), 2,048 tokens a step. How far two runs part
that differ by nothing that matters is measured too: ``fp32 again`` starts from weights of which each is moved by a
millionth. The last run is the counter-example of the V3 paper (appendix B.2): gradients of activations for Dgrad in
128 x 128 blocks (here made of their tiles) instead of 1 x 128 tiles. Losses are smoothed as the paper does
(exponential average, 0.9).
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing as mp
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDER = [
    "model.hidden_size=256", "model.intermediate_size=384", "model.moe_intermediate_size=160",
    "model.num_hidden_layers=4", "data.seq_len=128", "batch={global_batch: 16, micro_batch: 16}", "eval.every=0",
    "checkpoint.every=0", "log.tensorboard=off", "schedule={kind: constant, warmup_steps: 50}",
    "checkpoint.resume=never",
]  # fmt: skip
RUNS = {"fp32": "fp32", "fp8": "fp8", "fp32 again": "fp32", "fp8, gradients in blocks": "fp8"}


def train(run: str, steps: int, lr: float, seed: int, folder: str) -> None:
    import torch

    import moetrain
    from moetrain.model import FreshWeights
    from moetrain.parallel import plan
    from moetrain.precision import Groups, Reference
    from moetrain_kernels.quantise import Quantised, blocks

    class InBlocks(Reference):
        describe = "reference with gradients in blocks"

        def dgrad(self, dy: Quantised, weight: Quantised, groups: Groups, dtype: torch.dtype) -> torch.Tensor:
            return super().dgrad(blocks(dy.dequantise()), weight, groups, dtype)

    class Moved(FreshWeights):
        def fill(self, name: str, shape: Sequence[int], first: int, rows: torch.Tensor) -> None:
            super().fill(name, shape, first, rows)
            rows.mul_(1 + 1e-6 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(seed)))

    torch.set_num_threads(1)
    if "blocks" in run:
        plan.products_for = lambda name, device, **_: InBlocks()  # type: ignore[assignment]
    if "again" in run:
        from moetrain.engine import native

        native.FreshWeights = Moved  # type: ignore[misc]
    keys = [*WIDER, f"precision={RUNS[run]}", f"steps={steps}", f"seed={seed}", f"optimizer.lr={lr}"]
    keys.append(f"run_dir={folder}")
    moetrain.train(moetrain.load_config(ROOT / "configs" / "671B" / "smoke.yaml", keys))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--runs", nargs="*", default=list(RUNS), choices=RUNS, help="fp32 always comes first")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "fp8-curve.csv")
    given = parser.parse_args()
    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = ["fp32", *(run for run in given.runs if run != "fp32")]
        for run in runs:
            where = str(Path(folder, run.replace(" ", "-")))
            process = mp.get_context("spawn").Process(
                target=train, args=(run, given.steps, given.lr, given.seed, where)
            )
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"the run {run} ended with {process.exitcode}")
            lines = [json.loads(line) for line in Path(where, "metrics.jsonl").read_text().splitlines()]
            curves[run] = smooth([line["loss"] for line in lines if line["kind"] == "train"])
    with given.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *runs])
        writer.writerows([i + 1, *(f"{curves[run][i]:.6f}" for run in runs)] for i in range(given.steps))
    for run in runs[1:]:
        apart = [a / b - 1 for a, b in zip(curves[run], curves["fp32"], strict=True)][given.steps // 10 :]
        mean = sum(abs(x) for x in apart) / len(apart)
        print(
            f"{run}: smoothed loss apart by {100 * mean:.3f} % on average, {100 * max(map(abs, apart)):.3f} % at most, "
            f"{100 * apart[-1]:+.3f} % at the end ({curves[run][-1]:.4f} against {curves['fp32'][-1]:.4f})"
        )


def smooth(losses: list[float]) -> list[float]:
    out, average = [], losses[0]
    for loss in losses:
        average = 0.9 * average + 0.1 * loss
        out.append(average)
    return out


if __name__ == "__main__":
    main()
