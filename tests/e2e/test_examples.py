"""Every example runs, learns, and stays short."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.support.runs import ROOT, environment

EXAMPLES = sorted(p.name for p in (ROOT / "examples").glob("*.py"))


def run(*command: str) -> str:
    ran = subprocess.run(
        [sys.executable, *command], env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return ran.stdout


@pytest.mark.parametrize("name", EXAMPLES)
def test_it_learns_in_under_forty_lines(name):
    if name != "own_loop.py":
        pytest.importorskip("transformers")
    if name == "accelerate_loop.py":
        pytest.importorskip("accelerate")
    code = [line for line in (ROOT / "examples" / name).read_text().splitlines() if line.strip()]
    assert len(code) < 40
    losses = [float(x) for x in re.findall(r"loss (\d+\.\d+)", run(f"examples/{name}"))]
    assert len(losses) >= 3 and losses[-1] < 0.8 * losses[0]


@pytest.mark.dist
def test_the_accelerate_loop_takes_the_same_steps_on_two_processes():
    pytest.importorskip("accelerate")
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29743")
    launched, alone = (run(*how, "examples/accelerate_loop.py") for how in (launcher, ()))
    # the same sequences in each step, half of them on each process: every printed digit but the last
    numbers = [[float(x) for x in re.findall(r"(\d+\.\d+(?:e-\d+)?)", text)] for text in (launched, alone)]
    assert len(numbers[0]) == len(numbers[1]) >= 9
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-3, abs=1e-4)


def test_the_snippet_of_the_readme_runs_as_it_stands(monkeypatch):
    text = (ROOT / "README.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    monkeypatch.chdir(ROOT)
    names: dict[str, object] = {}
    exec(compile(snippet, "README.md", "exec"), names)
    report = names["report"]
    assert report.skipped is None and float(report.losses["mtp_1"]) > 0  # type: ignore[attr-defined]
