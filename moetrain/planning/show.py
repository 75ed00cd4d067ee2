"""A plan, or a dry run, as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from moetrain.planning.dry_run import PLANNED, DryRun
from moetrain.planning.hardware import GIB
from moetrain.planning.plan import GAPS, RESERVE, Change, Plan


def show(plan: Plan, mends: Sequence[Change] = (), console: Console | None = None) -> None:
    """Prints memory by pipeline rank, traffic, time and the verdict."""
    out = console or Console(highlight=False, width=120)
    kinds = list(dict.fromkeys(kind for rank in plan.ranks for kind in rank.by))
    memory = Table(title=f"{plan.name} on {plan.cluster}: GiB at each rank's peak", box=box.SIMPLE)
    memory.add_column("stage rank" if len(plan.ranks) > 1 else "rank", justify="right")
    elsewhere = ["drive"] if any(rank.drive for rank in plan.ranks) else []
    for name in (*kinds, "peak", "host", *elsewhere):
        memory.add_column(name, justify="right")
    for rank in plan.ranks:
        numbers = [rank.by.get(kind, 0) for kind in kinds] + [rank.peak, rank.host] + [rank.drive] * len(elsewhere)
        memory.add_row(str(rank.rank), *(f"{number / GIB:.1f}" for number in numbers))
    out.print(memory)
    speed = plan.speed
    if speed.flows:
        traffic = Table(title="what a GPU sends in a window, GB", box=box.SIMPLE)
        for name in ("kind", "whole tensors", "within the node", "between nodes", "seconds"):
            traffic.add_column(name, justify="left" if name == "kind" else "right")
        for flow in speed.flows:
            sizes = (flow.whole / 1e9, flow.node / 1e9, flow.network / 1e9, flow.seconds)
            traffic.add_row(flow.kind, *(f"{size:,.1f}" for size in sizes))
        out.print(traffic)
    parts = ", ".join(f"{kind} {seconds:,.1f}" for kind, seconds in sorted(speed.by.items(), key=lambda x: -x[1]))
    out.print(f"step: {speed.step:,.1f} s, {plan.slots} micro-batches of {plan.config.batch.micro_batch} ({parts})")
    out.print(
        f"{plan.flops / 1e15:,.1f} PFLOP a step: {speed.tokens:,.0f} tokens/s on each GPU, MFU {100 * speed.mfu:.1f} %"
    )
    price = f", {plan.cost:,.0f} dollars at {plan.cluster.hardware.price:g} an hour" if plan.cost else ""
    out.print(f"the whole run: {plan.days:,.0f} days{price}")
    out.print(verdict(plan))
    for change in mends:
        gpus = "" if change.plan.cluster.count == plan.cluster.count else f" on {change.plan.cluster}"
        slower = change.plan.speed.step / plan.speed.step - 1
        keys = str(change) or "the same"
        out.print(f"  fits: {keys}{gpus} ({change.plan.need / GIB:.0f} GiB, step {100 * slower:+.0f} %)")


def verdict(plan: Plan) -> str:
    """One sentence."""
    margin = f"with {100 * GAPS:.0f} % for gaps and {RESERVE / GIB:.0f} GiB for CUDA and NCCL"
    lacks = []
    if plan.need > plan.have:
        lacks.append(f"each GPU needs {plan.need / GIB:,.1f} GiB, {margin}, and has {plan.have / GIB:,.0f}")
    if plan.host_need > plan.host_have:
        lacks.append(
            f"each node needs {plan.host_need / GIB:,.0f} GiB of host memory and has {plan.host_have / GIB:,.0f}"
        )
    if plan.drive_need > plan.drive_have:
        lacks.append(f"each node needs {plan.drive_need / 1e12:.1f} TB on drives and has {plan.drive_have / 1e12:.1f}")
    if lacks:
        return f"does not fit: {'; '.join(lacks)}"
    if plan.have:
        return f"fits: {plan.need / GIB:,.1f} of {plan.have / GIB:,.0f} GiB on each GPU, {margin}"
    return f"fits: {plan.host_need / GIB:,.1f} of {plan.host_have / GIB:,.0f} GiB of host memory"


def show_dry_run(run: DryRun, console: Console | None = None) -> None:
    """Counted beside planned: memory of each distinct pipeline rank, and what its window sends."""
    out = console or Console(highlight=False, width=120)
    out.print(
        f"{run.config.name} on {run.cluster}, run dry: a window of {run.micro_batches} micro-batches of "
        f"{run.config.batch.micro_batch} on each rank"
    )
    kinds = list(dict.fromkeys(kind for rank in run.ranks for kind in rank.by))
    memory = Table(title="GiB at the peak, counted storage by storage", box=box.SIMPLE)
    memory.add_column("stage ranks" if len(run.ranks) > 1 else "ranks", justify="right")
    for name in (*kinds, "peak", "planned", "off"):
        memory.add_column(name, justify="right")
    for rank in run.ranks:
        numbers = [f"{size / GIB:.2f}" for size in (*(rank.by.get(kind, 0) for kind in kinds), rank.peak)]
        planned = ["-", "-"]
        if rank.planned is not None:
            planned = [f"{rank.planned.peak / GIB:.2f}", f"{100 * (rank.planned.peak / rank.peak - 1):+.2f} %"]
        memory.add_row(_ranks(rank.alike), *numbers, *planned)
    out.print(memory)
    traffic = Table(title="GB of the window's collectives, whole tensors: counted / planned", box=box.SIMPLE)
    sent = [kind for kind in PLANNED if any(any(rank.traffic[kind]) for rank in run.ranks)]
    traffic.add_column("stage ranks" if len(run.ranks) > 1 else "ranks", justify="right")
    for name in (*sent, "the rest", "operators"):
        traffic.add_column(name, justify="right")
    for rank in run.ranks:
        pairs = [f"{rank.traffic[kind][0] / 1e9:,.3f} / {rank.traffic[kind][1] / 1e9:,.3f}" for kind in sent]
        rest = sum(counted for kind, (counted, _) in rank.traffic.items() if kind not in PLANNED)
        traffic.add_row(_ranks(rank.alike), *pairs, f"{rest / 1e9:.6f}", f"{sum(rank.wire.values()) / 1e9:,.3f}")
    out.print(traffic)
    seconds, resident = max(rank.seconds for rank in run.ranks), max(rank.resident for rank in run.ranks)
    out.print(
        f"each of {len(run.ranks)} runs took {seconds:.0f} s of one processor and {resident / GIB:.1f} GiB here at most"
    )


def _ranks(ranks: Sequence[int]) -> str:
    """0-3, 7"""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def show_search(won: Sequence[Change], lost: Sequence[tuple[str, str]], console: Console | None = None) -> None:
    """The best ten, and of the rest the five nearest to fitting."""
    out = console or Console(highlight=False, width=160)
    table = Table(title="layouts that fit, the fastest first", box=box.SIMPLE)
    for name in ("step s", "tokens/s/GPU", "GiB", "keys"):
        table.add_column(name, justify="left" if name == "keys" else "right", no_wrap=name != "keys")
    for change in won[:10]:
        speed = change.plan.speed
        table.add_row(f"{speed.step:,.1f}", f"{speed.tokens:,.0f}", f"{change.plan.need / GIB:.0f}", str(change))
    out.print(table)
    out.print(f"{max(0, len(won) - 10)} more fit and are slower; {len(lost)} do not fit, such as")
    for keys, why in sorted(lost, key=lambda pair: float(pair[1].split()[1].replace(",", "")))[:5]:
        out.print(f"  {keys}: {why}")
