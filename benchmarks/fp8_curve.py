"""FP8 (reference) against fp32 from the same start on the same text: the relative difference of smoothed losses.

    python benchmarks/fp8_curve.py --steps 500

The model of configs/671B/smoke.yaml made wider than a tile (256, 384, 160), 4 sequences of 128 bytes a step. The third
run is the counter-example of the V3 paper (appendix B.2): activation gradients quantised in 128 x 128 blocks for Dgrad
instead of 1 x 128 tiles. Losses are smoothed as the paper does (exponential average, 0.9).
"""

from __future__ import annotations

import argparse
import csv
import json
import multiprocessing as mp
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
WIDER = [
    "model.hidden_size=256", "model.intermediate_size=384", "model.moe_intermediate_size=160",
    "model.num_hidden_layers=4", "data.seq_len=128", "batch={global_batch: 4, micro_batch: 4}", "eval.every=0",
    "checkpoint.every=0", "log.tensorboard=off", "optimizer.lr=1e-3", "schedule={kind: constant, warmup_steps: 20}",
    "checkpoint.resume=never",
]  # fmt: skip
RUNS = {"fp32": "fp32", "fp8": "fp8", "fp8, gradients in blocks": "fp8"}


def train(run: str, steps: int, seed: int, folder: str) -> None:
    import torch

    import moetrain
    from moetrain.precision import fp8
    from moetrain_kernels.quantise import blocks

    torch.set_num_threads(1)
    keys = [*WIDER, f"precision={RUNS[run]}", f"steps={steps}", f"seed={seed}", f"run_dir={folder}"]
    config = moetrain.load_config(ROOT / "configs" / "671B" / "smoke.yaml", keys)
    if "blocks" in run:
        forward = fp8._Linear.forward, fp8._Experts.forward
        tiles = fp8.tiles

        def in_backward(x: torch.Tensor, **kwargs: bool) -> fp8.Quantised:
            """Forwards keep their tiles (they run with gradients off inside a function, but for their own rows)."""
            return tiles(x, **kwargs) if fp8_forward[0] else blocks(x, **kwargs)

        fp8_forward = [False]

        def marked(inner):  # type: ignore[no-untyped-def]
            def run_it(ctx, *args):  # type: ignore[no-untyped-def]
                fp8_forward[0] = True
                try:
                    return inner(ctx, *args)
                finally:
                    fp8_forward[0] = False

            return staticmethod(run_it)

        fp8._Linear.forward, fp8._Experts.forward = marked(forward[0]), marked(forward[1])  # type: ignore[assignment]
        fp8._SwiGLU.forward = marked(fp8._SwiGLU.forward)  # type: ignore[assignment]
        fp8.tiles = in_backward  # type: ignore[assignment]
    moetrain.train(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--csv", type=Path, default=Path(__file__).parent / "results" / "fp8-curve.csv")
    given = parser.parse_args()
    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        for run in RUNS:
            where = str(Path(folder, run.replace(" ", "-")))
            process = mp.get_context("spawn").Process(target=train, args=(run, given.steps, given.seed, where))
            process.start()
            process.join()
            lines = [json.loads(line) for line in Path(where, "metrics.jsonl").read_text().splitlines()]
            curves[run] = smooth([line["loss"] for line in lines if line["kind"] == "train"])
    with given.csv.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *RUNS])
        writer.writerows([i + 1, *(f"{curves[run][i]:.6f}" for run in RUNS)] for i in range(given.steps))
    for run in list(RUNS)[1:]:
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
