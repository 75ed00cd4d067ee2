"""``report RUN``: what a run did, from its metrics.jsonl."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from moetrain.errors import UserError


def report(run_dir: Path) -> None:
    """Prints a table of a run's first, best and last numbers.

    Raises:
        UserError: the folder has no metrics, or none that can be read.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{run_dir} holds no metrics.jsonl; give the folder of a run")
    records = [record for line in path.read_text(encoding="utf-8").splitlines() if (record := _parsed(line))]
    train = [r for r in records if r.get("kind") == "train"]
    if not train:
        raise UserError(f"{path} holds no training step yet; wait for the run's first step")
    last = train[-1]
    table = Table(title=str(run_dir), show_header=False)
    table.add_row("steps", f"{last['step']:,}")
    table.add_row("tokens", f"{last['tokens']:,}")
    table.add_row("loss, first", _loss(train[0]))
    finite = [r for r in train if r.get("loss") is not None]
    if finite:
        best = min(finite, key=lambda r: r["loss"])
        table.add_row("loss, best", f"{_loss(best)} (step {best['step']:,})")
    table.add_row("loss, last", _loss(last))
    speeds = [r["tokens_per_s"] for r in train if r.get("tokens_per_s")]
    if speeds:
        table.add_row("tokens/s, median", f"{statistics.median(speeds):,.0f}")
    if last.get("max_violation") is not None:
        table.add_row("max violation, last", f"{last['max_violation']:.3f}")
    held_out = [r for r in records if r.get("kind") == "eval" and r.get("eval_loss") is not None]
    if held_out:
        text, perplexity = f"{held_out[-1]['eval_loss']:.4f}", held_out[-1].get("perplexity")
        table.add_row("held out, last", text if perplexity is None else f"{text}, perplexity {perplexity:.2f}")
    Console().print(table)


def _loss(record: dict[str, Any]) -> str:
    return "not finite" if record.get("loss") is None else f"{record['loss']:.4f}"


def _parsed(line: str) -> dict[str, Any] | None:
    """A record, or None for a line that a kill cut off."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
