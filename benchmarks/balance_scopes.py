"""How far each balance scope is from the true global batch under accumulation, and whether it matters.

    python benchmarks/balance_scopes.py            # about 20 minutes on two cores; writes results/ and the figure
    python benchmarks/balance_scopes.py --quick    # a minute, to see that it runs

A small mixture of experts learns four real domains (Python code, its documentation strings, C++ headers, arithmetic),
one domain in each micro-batch: the skew that accumulation meets when data is not shuffled token by token. Windows hold
2 to 32 micro-batches. While a model trains with the exact scope ``window``, the gradient that every scope would give at
the same parameters for the same window is compared with the exact one, in float64. Then models are trained with every
scope on the same tokens. What comes out is in ``docs/balance-scopes.md``.
"""

from __future__ import annotations

import argparse
import ast
import csv
import multiprocessing as mp
import random
import statistics
import sysconfig
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moetrain import Balance, MoEAccumulator, Window
from moetrain.config.model import ModelConfig
from moetrain.model import DeepSeek, DeepSeekLoss
from moetrain.parallel.recompute import recompute_in_backward

SCOPES = ("sequence", "micro_batch", "running", "previous", "window")
ROWS, TOKENS = 4, 64
ALPHA, RATE = 1e-2, 3e-3
CONFIG = ModelConfig(
    model_type="deepseek_v2", vocab_size=256, hidden_size=64, intermediate_size=128, moe_intermediate_size=32,
    num_hidden_layers=4, first_k_dense_replace=1, num_attention_heads=4, q_lora_rank=None, kv_lora_rank=16,
    qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=16, n_routed_experts=16, n_shared_experts=1,
    num_experts_per_tok=2, n_group=1, topk_group=1, scoring_func="softmax", topk_method="greedy",
    norm_topk_prob=False, routed_scaling_factor=1.0, max_position_embeddings=TOKENS, initializer_range=0.05,
)  # fmt: skip
HERE = Path(__file__).parent


# -- the domains ------------------------------------------------------------------------------------------------------


def domains(size: int = 2_000_000) -> dict[str, Tensor]:
    """Domain -> its bytes; the last tenth is held out."""
    library = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    code, words = [], []
    for path in library:
        text = path.read_text(encoding="utf-8", errors="replace")
        code.append(text)
        words += [
            found
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (found := ast.get_docstring(node))
        ]
    headers = sorted(Path(torch.__file__).parent.joinpath("include", "ATen").rglob("*.h"))
    r = random.Random(0)
    sums = (f"{a} {op} {b} = {a + b if op == '+' else a * b}\n" for a, b, op in _numbers(r))
    texts = {
        "code": "".join(code),
        "documentation": "\n\n".join(words),
        "C++ headers": "".join(p.read_text(errors="replace") for p in headers[:600]),
        "arithmetic": "".join(next(sums) for _ in range(size // 16)),
    }
    return {name: torch.frombuffer(bytearray(text.encode()[:size]), dtype=torch.uint8) for name, text in texts.items()}


def _numbers(r: random.Random) -> Iterator[tuple[int, int, str]]:
    while True:
        yield r.randrange(10000), r.randrange(1000), r.choice("+*")


class Batches:
    """Micro-batch number n of a seed: ``ROWS`` sequences of one domain, the same for every scope and window."""

    def __init__(self, texts: dict[str, Tensor], seed: int) -> None:
        self.parts = [text[: len(text) * 9 // 10] for text in texts.values()]
        self.held = [text[len(text) * 9 // 10 :] for text in texts.values()]
        self.seed = seed

    def micro_batch(self, number: int) -> dict[str, Tensor]:
        r = random.Random(self.seed * 10**9 + number)
        return self._rows(r.choice(self.parts), r)

    def window(self, step: int, size: int) -> Window:
        return Window(self.micro_batch(step * size + k) for k in range(size))

    def held_out(self) -> Window:
        r = random.Random(0)
        return Window(self._rows(part, r) for part in self.held for _ in range(16))

    @staticmethod
    def _rows(part: Tensor, r: random.Random) -> dict[str, Tensor]:
        starts = [r.randrange(len(part) - TOKENS) for _ in range(ROWS)]
        ids = torch.stack([part[s : s + TOKENS] for s in starts]).to(torch.int64)
        return {"input_ids": ids, "labels": ids}


# -- gradients of every scope at the same place -----------------------------------------------------------------------


def gradient(model: DeepSeek, balance: Balance, window: Window, previous: Any) -> Tensor:
    """The whole gradient as one vector, float64."""
    accumulator = MoEAccumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.0), loss=DeepSeekLoss(CONFIG), balance=balance
    )
    accumulator.ledger.previous = previous
    kept: list[Tensor] = []
    accumulator.owner.step = lambda: kept.append(  # type: ignore[method-assign]
        torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    )
    accumulator.step(window)
    return kept[0]


def gradient_errors(model: DeepSeek, window: Window, previous: Any) -> list[dict[str, Any]]:
    exact_model = DeepSeek(CONFIG).to(torch.float64)
    exact_model.load_state_dict(model.state_dict())
    task = gradient(exact_model, Balance(), window, None)
    whole = {
        scope: gradient(exact_model, Balance(scope=scope, alpha=ALPHA), window, previous)  # type: ignore[arg-type]
        for scope in SCOPES
    }
    rows = []
    for scope in SCOPES:
        a, b = whole[scope] - task, whole["window"] - task
        rows.append(
            {
                "scope": scope,
                "balance_error": float((a - b).norm() / b.norm()),
                "balance_cosine": float(torch.dot(a, b) / (a.norm() * b.norm())),
                "total_error": float((whole[scope] - whole["window"]).norm() / whole["window"].norm()),
                "total_cosine": float(
                    torch.dot(whole[scope], whole["window"]) / (whole[scope].norm() * whole["window"].norm())
                ),
            }
        )
    return rows


# -- training ---------------------------------------------------------------------------------------------------------


def train(scope: str, size: int, seed: int, micro_batches: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """One run; returns its summary, and gradient comparisons where the scope is ``window``."""
    torch.set_num_threads(1)
    batches = Batches(domains(), seed)
    model = DeepSeek(CONFIG)
    model.init_weights(seed)
    steps = micro_batches // size
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE * (size / 8) ** 0.5, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / (0.05 * steps + 1)))
    accumulator = MoEAccumulator(
        model,
        optimizer,
        loss=DeepSeekLoss(CONFIG),
        balance=Balance(scope=scope, alpha=ALPHA),  # type: ignore[arg-type]
        max_norm=1.0,
        scheduler=schedule,
    )
    violation: list[float] = []
    errors = []
    measured = {max(1, steps * part // 8) for part in (1, 2, 3, 4, 5, 6, 7)} if scope == "window" else set()
    for step in range(steps):
        window = batches.window(step, size)
        if step in measured:
            found = gradient_errors(model, window, accumulator.ledger.previous)
            errors += [{"size": size, "seed": seed, "step": step, **row} for row in found]
        violation.append(float(accumulator.step(window).max_violation.mean()))
    held = 0.0
    with torch.no_grad():
        valid = 0
        for item in batches.held_out():
            held += float(DeepSeekLoss(CONFIG)(model, item)[0])
            valid += int((item.targets() != -100).sum())
    eighths = [
        statistics.fmean(violation[steps * i // 8 : max(steps * (i + 1) // 8, steps * i // 8 + 1)]) for i in range(8)
    ]
    summary = {
        "scope": scope, "size": size, "seed": seed, "steps": steps, "held_out_loss": held / valid,
        **{f"violation_{i + 1}": v for i, v in enumerate(eighths)},
    }  # fmt: skip
    return summary, errors


def job(arguments: tuple[str, int, int, int]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    start = time.perf_counter()
    out = train(*arguments)
    print(f"{arguments}: {time.perf_counter() - start:.0f} s, held out {out[0]['held_out_loss']:.4f}", flush=True)
    return out


# -- time and memory --------------------------------------------------------------------------------------------------


@contextmanager
def live_bytes() -> Iterator[dict[str, int]]:
    """``peak``: most bytes that autograd held at once for backwards, each storage once, parameters left out."""
    seen: dict[int, int] = {}
    count = {"now": 0, "peak": 0}

    def gone(key: int, size: int) -> None:
        seen[key] -= 1
        if not seen[key]:
            del seen[key]
            count["now"] -= size

    class Held:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    def pack(x: Tensor) -> Any:
        if isinstance(x, torch.nn.Parameter) or isinstance(x._base, torch.nn.Parameter):
            return x
        storage = x.untyped_storage()
        key, size = storage.data_ptr(), storage.nbytes()
        if key not in seen:
            seen[key] = 0
            count["now"] += size
            count["peak"] = max(count["peak"], count["now"])
        seen[key] += 1
        held = Held(x)
        weakref.finalize(held, gone, key, size)
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda h: h.x if isinstance(h, Held) else h):
        yield count


def costs(size: int, rounds: int) -> list[dict[str, Any]]:
    """Step time over that of ``sequence``, in turn, and what autograd holds, with and without recompute."""
    batches = Batches(domains(), 0)
    sides: dict[tuple[str, str, bool], MoEAccumulator] = {}
    for recompute in (False, True):
        for scope, order in [(s, "forwards_first") for s in SCOPES] + [("window", "counting_pass")]:
            model = DeepSeek(CONFIG)
            model.init_weights(0)
            if recompute:
                for block in model.layers:
                    recompute_in_backward(block)
            optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)
            balance = Balance(scope=scope, alpha=ALPHA)  # type: ignore[arg-type]
            sides[scope, order, recompute] = MoEAccumulator(
                model,
                optimizer,
                loss=DeepSeekLoss(CONFIG),
                balance=balance,
                max_norm=1.0,
                window_order=order,  # type: ignore[arg-type]
            )
    seconds: dict[tuple[str, str, bool], list[float]] = {side: [] for side in sides}
    held = {}
    order_of_sides = list(sides)
    for i in range(rounds + 2):
        random.Random(i).shuffle(order_of_sides)
        window = batches.window(i, size)
        for side in order_of_sides:
            if i == 0:
                with live_bytes() as count:
                    sides[side].step(window)
                held[side] = count["peak"]
                continue
            start = time.perf_counter()
            sides[side].step(window)
            if i >= 2:
                seconds[side].append(time.perf_counter() - start)
    return [
        {
            "scope": scope, "order": order if scope == "window" else "", "recompute": recompute, "size": size,
            "time_over_sequence": round(statistics.median(
                a / b
                for a, b in zip(
                    seconds[scope, order, recompute], seconds["sequence", "forwards_first", recompute], strict=True
                )
            ), 3),
            "held_mib": round(held[scope, order, recompute] / 2**20, 2),
        }
        for scope, order, recompute in sides
    ]  # fmt: skip


# -- the report -------------------------------------------------------------------------------------------------------


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def figure(errors: list[dict[str, Any]], runs: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    colours = dict(zip(SCOPES, ("tab:gray", "tab:red", "tab:orange", "tab:blue", "tab:green"), strict=True))
    sizes = sorted({row["size"] for row in errors})
    fig, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4.2))
    for scope in SCOPES[:-1]:
        for key, style in (("balance_error", "-"), ("total_error", ":")):
            means = [
                statistics.fmean(r[key] for r in errors if r["scope"] == scope and r["size"] == size) for size in sizes
            ]
            left.plot(sizes, means, style, marker="o", color=colours[scope], label=scope if style == "-" else None)
    left.set(
        xscale="log", yscale="log", xlabel="micro-batches in a window", title="gradient error: balance (—), total (···)"
    )
    left.set_xticks(sizes, [str(s) for s in sizes])
    left.minorticks_off()
    left.legend()
    trained = sorted({row["size"] for row in runs if row["scope"] == "sequence"})
    shown = trained[len(trained) // 2]
    for scope in SCOPES:
        of = [r for r in runs if r["scope"] == scope and r["size"] == shown]
        middle.plot(
            [i / 8 for i in range(1, 9)],
            [statistics.fmean(r[f"violation_{i}"] for r in of) for i in range(1, 9)],
            color=colours[scope], marker="o", label=scope,
        )  # fmt: skip
    middle.set(xlabel="share of training", title=f"max violation of the global batch, {shown} micro-batches")
    middle.legend()
    for scope in SCOPES:
        points = [[r["held_out_loss"] for r in runs if r["scope"] == scope and r["size"] == size] for size in trained]
        means = [statistics.fmean(p) for p in points]
        spread = [statistics.stdev(p) if len(p) > 1 else 0.0 for p in points]
        right.errorbar(trained, means, spread, color=colours[scope], marker="o", capsize=3, label=scope)
    right.set(xscale="log", xlabel="micro-batches in a window", title="held-out loss at equal tokens (nats per byte)")
    right.set_xticks(trained, [str(s) for s in trained])
    right.minorticks_off()
    fig.tight_layout()
    fig.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--micro-batches", type=int, default=3072, help="of 4 x 64 tokens, for each run")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--figure", type=Path, default=HERE.parent / "docs" / "balance-scopes.svg")
    given = parser.parse_args()
    length, seeds = (128, 1) if given.quick else (given.micro_batches, given.seeds)
    jobs = [("window", size, seed, length) for size in (2, 4, 8, 16, 32) for seed in range(seeds)]
    jobs += [(scope, size, seed, length) for scope in SCOPES[:-1] for size in (2, 8, 32) for seed in range(seeds)]
    with mp.get_context("spawn").Pool(2, maxtasksperchild=1) as pool:
        done = pool.map(job, jobs, chunksize=1)
    runs, errors = [summary for summary, _ in done], [row for _, rows in done for row in rows]
    prices = costs(8, 3 if given.quick else 15)
    write(given.results / "balance-scopes-runs.csv", runs)
    write(given.results / "balance-scopes-gradients.csv", errors)
    write(given.results / "balance-scopes-costs.csv", prices)
    given.figure.parent.mkdir(parents=True, exist_ok=True)
    figure(errors, runs, given.figure)
    print(tables(errors, runs, prices))


def tables(errors: list[dict[str, Any]], runs: list[dict[str, Any]], prices: list[dict[str, Any]]) -> str:
    """The tables of docs/balance-scopes.md."""
    sizes = sorted({row["size"] for row in errors})
    out = ["| scope | " + " | ".join(f"K = {s}" for s in sizes) + " |", "|---|" + "---|" * len(sizes)]
    for key, cosine, digits in (("balance_error", "balance_cosine", 3), ("total_error", "total_cosine", 5)):
        for scope in SCOPES[:-1]:
            cells = []
            for size in sizes:
                of = [r for r in errors if r["scope"] == scope and r["size"] == size]
                error, angle = (statistics.fmean(r[k] for r in of) for k in (key, cosine))
                cells.append(f"{error:.2g} ({angle:.{digits}f})")
            out.append(f"| {key.split('_')[0]}, `{scope}` | " + " | ".join(cells) + " |")
    trained = sorted({row["size"] for row in runs if row["scope"] == "sequence"})
    out += ["", "| scope | " + " | ".join(f"violation, K = {s}" for s in trained) + " | "
            + " | ".join(f"loss, K = {s}" for s in trained) + " |", "|---|" + "---|" * (2 * len(trained))]  # fmt: skip
    for scope in SCOPES:
        of_size = [[r for r in runs if r["scope"] == scope and r["size"] == s] for s in trained]
        last = [statistics.fmean(r[f"violation_{i}"] for r in of for i in (5, 6, 7, 8)) for of in of_size]
        means = [statistics.fmean(r["held_out_loss"] for r in of) for of in of_size]
        spread = [statistics.stdev(r["held_out_loss"] for r in of) if len(of) > 1 else 0.0 for of in of_size]
        out.append(f"| `{scope}` | " + " | ".join(f"{v:.2f}" for v in last) + " | "
                   + " | ".join(f"{m:.4f} ± {s:.4f}" for m, s in zip(means, spread, strict=True)) + " |")  # fmt: skip
    out += ["", "| scope | recompute | time over `sequence` | held for backwards, MiB |", "|---|---|---|---|"]
    for row in prices:
        name = f"`{row['scope']}`" + (f", {row['order'].replace('_', ' ')}" if row["order"] else "")
        out.append(
            f"| {name} | {'on' if row['recompute'] else 'off'} | {row['time_over_sequence']} | {row['held_mib']} |"
        )
    return "\n".join(out)


if __name__ == "__main__":
    main()
