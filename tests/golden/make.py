"""Writes tests/golden/losses.json; run it only with the reason in the commit: `python -m tests.golden.make`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from tests.support.runs import records, train_on

#: name: ranks, scale, further keys
CASES: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "16B one process": (1, "16B", ()),
    "236B one process": (1, "236B", ()),
    "671B one process": (1, "671B", ()),
    "671B window scope": (1, "671B", ("balance.scope=window", "balance.alpha=0.1")),
    "671B documents masked": (1, "671B", ("data.document_mask=true",)),
    "671B two ranks, recompute": (2, "671B", ("parallel.recompute=full",)),
    "671B experts over two, selective recompute": (2, "671B", ("parallel.ep=2", "parallel.recompute=selective")),
    "671B two copies of two": (4, "671B", ("parallel.dp_replicate=2",)),
    "671B two stages": (2, "671B", ("parallel.pp=2", "balance.scope=window", "balance.alpha=0.1")),
    "671B stages in a V": (
        2,
        "671B",
        (
            "parallel.pp=2",
            "parallel.schedule=dualpipev",
            "parallel.reshard_after_forward=false",
            "model.num_hidden_layers=4",
        ),
    ),
}
TERMS = ("lm", "total", "grad_norm", "max_violation")


def curve(case: str, folder: Path) -> dict[str, list[float]]:
    """Losses of five steps, by term."""
    world, scale, more = CASES[case]
    run = train_on(world, scale, folder, "steps=5", "precision=float64", "optimizer.eps=1e-4", *more)
    found = records(run)
    return {term: [record[term] for record in found] for term in TERMS}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        golden = {case: curve(case, Path(folder) / str(i)) for i, case in enumerate(CASES)}
    (Path(__file__).parent / "losses.json").write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
