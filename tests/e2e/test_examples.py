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
    launched = run(*launcher, "examples/accelerate_loop.py")
    assert len(re.findall(r"step 5 ", launched)) == 1
