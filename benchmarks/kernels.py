"""Each kernel on this GPU against torch and, where installed, DeepGEMM and Liger; and against the chip's limits.

    python benchmarks/kernels.py        # writes benchmarks/results/<gpu>.csv

The shapes are of a V3 layer on one of 8 expert-parallel ranks: 4,096 tokens, width 7168, 32 local experts of width
2048, 8 chosen of 256. Times are medians of 20 runs after 5, the kinds in turn, each between CUDA events with the L2
cache cleared.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import itertools
import re
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

#: compute capability -> (TFLOP/s bf16, TFLOP/s FP8, GB/s), dense, from the vendor's data sheets (SXM forms)
LIMITS = {(9, 0): (989.0, 1979.0, 4800.0), (10, 0): (2250.0, 4500.0, 8000.0)}
TOKENS, WIDTH, EXPERTS, EXPERT_WIDTH, CHOSEN = 4096, 7168, 32, 2048, 8


class Case(NamedTuple):
    """One operation; FLOPs and bytes are those it needs, whoever does it."""

    name: str
    flops: float
    bytes: float
    fp8: bool
    ways: dict[str, Callable[[], object]]


def cases() -> Iterator[Case]:
    from moetrain.precision import Groups, products_for
    from moetrain_kernels import quantise, triton_grouped, triton_moe, triton_quantise

    g = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(*shape, generator=g, device="cuda", dtype=dtype)

    rows = TOKENS * CHOSEN // 8
    counts = torch.full((EXPERTS,), rows // EXPERTS, device="cuda")
    counts[1] += counts[0]
    counts[0] = 0  # one starved
    x, w = randn(rows, WIDTH), randn(EXPERTS, 2 * EXPERT_WIDTH, WIDTH)
    dy = randn(rows, 2 * EXPERT_WIDTH)
    flops = 2.0 * rows * WIDTH * 2 * EXPERT_WIDTH
    size = x.numel() + dy.numel()
    ends = counts.cumsum(0, dtype=torch.int32)
    plain = torch.nn.functional.grouped_mm
    yield Case("grouped product, bf16", flops, 2.0 * (size + w.numel()), False, {
        "moetrain": lambda: triton_grouped.grouped_product(x, w, counts),
        "torch grouped_mm": lambda: plain(x, w.transpose(1, 2), offs=ends),
    })  # fmt: skip
    yield Case("grouped weight gradient, bf16", flops, 2.0 * (size + w.numel()), False, {
        "moetrain": lambda: triton_grouped.grouped_product_weight(dy, x, counts),
        "torch grouped_mm": lambda: plain(dy.t(), x, offs=ends),
    })  # fmt: skip
    products = products_for("triton", torch.device("cuda"))
    groups = Groups(counts, rows)
    q, weight = products.tiles(x, power_of_two=False, floor=1e-4), products.weight(w, 2, power_of_two=False)
    gq = products.tiles(dy, power_of_two=False, floor=1e-30)
    fp8_bytes = 1.0 * (x.numel() + w.numel()) + 2.0 * dy.numel()
    ways: dict[str, Callable[[], object]] = {"moetrain": lambda: products.fprop(q, weight, groups, torch.bfloat16)}
    if importlib.util.find_spec("deep_gemm"):
        ways |= deep_gemm(x, w)
    yield Case("grouped product, fp8", flops, fp8_bytes, True, ways)
    yield Case("grouped product to inputs, fp8", flops, fp8_bytes, True, {
        "moetrain": lambda: products.dgrad(gq, weight, groups, torch.bfloat16),
    })  # fmt: skip
    yield Case("grouped weight gradient with its columns, fp8", flops, 3.0 * dy.numel() + 2.0 * x.numel(), True, {
        "moetrain": lambda: products.wgrad(dy, q, groups, power_of_two=False),
    })  # fmt: skip
    square, other = randn(TOKENS, WIDTH), randn(WIDTH, WIDTH)
    one, single = (
        Groups(torch.tensor([TOKENS], device="cuda"), TOKENS),
        products.weight(other[None], 1, power_of_two=False),
    )
    sq = products.tiles(square, power_of_two=False, floor=1e-4)
    yield Case("linear, fp8 (cuBLAS in bf16)", 2.0 * TOKENS * WIDTH**2, 1.0 * (WIDTH**2 + 3 * TOKENS * WIDTH), True, {
        "moetrain": lambda: products.fprop(sq, single, one, torch.bfloat16),
        "cuBLAS bf16": lambda: square @ other.t(),
    })  # fmt: skip
    yield Case("tiles", 0, 3.0 * square.numel(), False, {
        "moetrain": lambda: triton_quantise.tiles(square),
        "torch": lambda: quantise.tiles(square),
    })  # fmt: skip
    yield Case("blocks of a weight, both ways", 0, 4.0 * other.numel(), False, {
        "moetrain": lambda: triton_quantise.blocks(other[None], 1, False),
        "torch": lambda: quantise.blocks(other),
    })  # fmt: skip
    gu, scale = randn(rows, 2 * EXPERT_WIDTH), torch.rand(rows, device="cuda")
    dh = randn(rows, EXPERT_WIDTH)

    def by_torch() -> torch.Tensor:
        gate, up = gu.chunk(2, dim=1)
        return (torch.nn.functional.silu(gate) * up * scale.unsqueeze(1)).to(gu.dtype)

    swiglu = {"moetrain": lambda: triton_moe.swiglu(gu, scale), "torch": by_torch}
    if importlib.util.find_spec("liger_kernel"):
        from liger_kernel.ops.swiglu import LigerSiLUMulFunction

        swiglu["Liger, without the weight"] = lambda: LigerSiLUMulFunction.apply(*gu.chunk(2, dim=1))
    yield Case("swiglu", 0, 2.0 * (gu.numel() + dh.numel()), False, swiglu)
    yield Case("swiglu into tiles", 0, 2.0 * gu.numel() + dh.numel(), False, {
        "moetrain": lambda: triton_moe.swiglu_tiles(gu, scale),
        "torch": lambda: quantise.tiles(by_torch()),
    })  # fmt: skip
    logits, bias = randn(TOKENS, 256, dtype=torch.float32), randn(256, dtype=torch.float32)

    def gate() -> torch.Tensor:
        biased = logits.sigmoid() + bias
        best = biased.unflatten(1, (8, -1)).topk(2, dim=-1).values.sum(-1).topk(4, dim=-1).indices
        shut = torch.ones(TOKENS, 8, dtype=torch.bool, device="cuda").scatter_(1, best, False)
        choice = biased.masked_fill(shut.repeat_interleave(32, dim=1), -torch.inf).topk(CHOSEN, dim=-1).indices
        return torch.bincount(choice.flatten(), minlength=256)

    yield Case("router", 0, 8.0 * logits.numel(), False, {
        "moetrain": lambda: triton_moe.route(logits, bias, CHOSEN, 8, 4, True, True),
        "torch": gate,
    })  # fmt: skip
    row_N = torch.arange(TOKENS, device="cuda").repeat_interleave(CHOSEN)[
        torch.randperm(TOKENS * CHOSEN, device="cuda")
    ]
    position_N, offset_R = row_N.argsort(stable=True), torch.arange(0, TOKENS * CHOSEN, CHOSEN, device="cuda")
    entries = square.index_select(0, row_N)
    yield Case("gather rows", 0, 2.0 * (square.numel() + entries.numel()), False, {
        "moetrain": lambda: triton_moe.gather_rows(square, row_N, position_N, offset_R),
        "torch index_select": lambda: square.index_select(0, row_N),
    })  # fmt: skip
    yield Case("sum rows", 0, 2.0 * (square.numel() + entries.numel()), False, {
        "moetrain": lambda: triton_moe.sum_rows(entries, row_N, position_N, offset_R),
        "torch embedding_bag": lambda: torch.nn.functional.embedding_bag(position_N, entries, offset_R, mode="sum"),
    })  # fmt: skip


def deep_gemm(x: torch.Tensor, w: torch.Tensor) -> dict[str, Callable[[], object]]:
    """With groups of 128 rows each, which is what it takes (its own quantisers; the product alone is timed)."""
    import deep_gemm as theirs
    from deep_gemm.utils import per_block_cast_to_fp8, per_token_cast_to_fp8

    rows = x.shape[0]
    a = per_token_cast_to_fp8(x, use_ue8m0=False)
    parts = [per_block_cast_to_fp8(m, use_ue8m0=False) for m in w]
    b = torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
    out = torch.empty(rows, w.shape[1], device="cuda", dtype=torch.bfloat16)
    layout = torch.arange(rows, device="cuda", dtype=torch.int32) // (rows // w.shape[0])
    return {"DeepGEMM": lambda: theirs.m_grouped_fp8_gemm_nt_contiguous(a, b, out, layout)}


def tune(runs: int) -> None:
    """The fastest sizes of each grouped product here, as a line for ``moetrain_kernels.triton_grouped.CONFIGS``."""
    from triton.runtime.errors import OutOfResources

    from moetrain_kernels import triton_grouped

    major = torch.cuda.get_device_capability()[0]
    table = triton_grouped.CONFIGS.setdefault(major, {})
    kinds = {
        "bf16": "grouped product, bf16",
        "bf16, weights": "grouped weight gradient, bf16",
        "fp8": "grouped product, fp8",
        "fp8, weights": "grouped weight gradient with its columns, fp8",
    }
    ways = {case.name: case.ways["moetrain"] for case in cases()}
    for kind, name in kinds.items():
        found = {}
        for n, j, warps, stages in itertools.product((64, 128), (64, 128, 256), (4, 8), (3, 4)):
            table[kind] = {"BLOCK_N": n, "BLOCK_J": j, "num_warps": warps, "num_stages": stages}
            try:
                found[in_turn({"": ways[name]}, runs)[""]] = table[kind]
            except (RuntimeError, OutOfResources):  # more shared memory or registers than there are
                continue
        best = min(found)
        table[kind] = found[best]
        print(f"{major}: {kind}: {found[best]}  # {best:.3f} ms")


def in_turn(ways: dict[str, Callable[[], object]], runs: int) -> dict[str, float]:
    """Median milliseconds of each."""
    cache = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(-5, runs):
        for name, way in ways.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            cache.zero_()
            start.record()
            way()
            end.record()
            end.synchronize()
            if run >= 0:
                times[name].append(start.elapsed_time(end))
    return {name: statistics.median(t) for name, t in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--tune", action="store_true", help="find the sizes of the grouped products first")
    given = parser.parse_args()
    runs = given.runs
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/kernels.py measures CUDA kernels and this machine has no GPU")
    if given.tune:
        tune(runs)
    gpu = torch.cuda.get_device_name()
    half, fp8, bandwidth = LIMITS.get(torch.cuda.get_device_capability(), (float("nan"),) * 3)
    path = Path(__file__).parent / "results" / (re.sub(r"\W+", "-", gpu).strip("-").lower() + ".csv")
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["operation", "by", "ms", "over moetrain", "TFLOP/s", "GB/s", "of the chip's limit"])
        for case in cases():
            times = in_turn(case.ways, runs)
            for name, ms in times.items():
                rate, moved = case.flops / ms / 1e9, case.bytes / ms / 1e6
                limit = rate / (fp8 if case.fp8 and "bf16" not in name else half) if case.flops else moved / bandwidth
                row = [case.name, name, f"{ms:.4f}", f"{ms / times['moetrain']:.2f}", f"{rate:.0f}", f"{moved:.0f}"]
                writer.writerow([*row, f"{limit:.2f}"])
                print(f"{case.name:46} {name:26} {ms:8.3f} ms  {rate:6.0f} TFLOP/s  {moved:6.0f} GB/s  {limit:4.0%}")
    print(path)


if __name__ == "__main__":
    main()
