"""The smoke configs as they are, under torchrun, on 2 and 8 processes, against one process; and a kill under torchrun.

Slow: behind ``make test-all``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from moetrain.checkpoint import CheckpointFolder
from tests.support.runs import ROOT, SCALES, corpus, environment, losses, overrides

pytestmark = [pytest.mark.slow, pytest.mark.dist]
PORT = 29100 + os.getpid() % 300

# the configs' own AdamW eps of 1e-8; sums in another order (seen: 1.3e-16 and 6e-8)
BOUND = {"float64": 1e-12, "fp32": 1e-6}


def command(world: int, scale: str, *more: str) -> list[str]:
    launcher = ["torch.distributed.run", "--nproc_per_node", str(world), "--master_port", str(PORT), "-m"]
    return [
        sys.executable,
        "-m",
        *launcher,
        "moetrain",
        "--config",
        str(ROOT / "configs" / scale / "smoke.yaml"),
        *more,
    ]


def run(world: int, scale: str, folder: Path, *more: str) -> list[float]:
    asked = (f"run_dir={folder}", "log.tensorboard=off", "eval.every=0", "steps=4", *more)
    ran = subprocess.run(command(world, scale, *asked), env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return losses(folder)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("precision", BOUND)
def test_the_smoke_configs_themselves_have_one_curve_on_1_2_and_8_processes(tmp_path, scale, precision):
    want = run(1, scale, tmp_path / "1", f"precision={precision}")
    for world in (2, 8):
        got = run(world, scale, tmp_path / str(world), f"precision={precision}", "batch.micro_batch=2")
        apart = max(abs(a - b) / b for a, b in zip(got, want, strict=True))
        print(f"{scale}, {precision}, {world} processes: {apart:.1e}")
        assert apart < BOUND[precision]


@pytest.mark.timeout(600)
def test_a_rank_killed_under_torchrun_loses_nothing_also_over_the_end_of_an_epoch(tmp_path):
    """The data is 40 sequences, so steps of 16 cross an epoch; rank 1 dies after a checkpoint; the run goes on."""
    small = overrides("671B", tmp_path, "steps=8", "checkpoint.every=2", f"data.source={one_text(tmp_path)}")
    whole = [*small, f"run_dir={tmp_path / 'whole'}"]
    subprocess.run(command(2, "671B", *whole), env=environment(), cwd=ROOT, check=True, capture_output=True)
    process = subprocess.Popen(
        command(2, "671B", *small),
        env=environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "step 5/8" in line:
            break
    victims = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
    os.kill(int(victims[-1]), signal.SIGKILL)
    process.communicate(timeout=120)
    assert process.returncode != 0
    subprocess.run(command(2, "671B", *small), env=environment(), cwd=ROOT, check=True, capture_output=True)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole") and len(losses(tmp_path / "run")) == 8
    # the order of tensors in a file follows the writer's threads, so what is in them is compared
    a, b = (contents(tmp_path / name / "checkpoints" / "step_00000008") for name in ("run", "whole"))
    assert a.keys() == b.keys() and len(a) > 100
    assert all(torch.equal(a[name], b[name]) for name in a), "not bit for bit"
    assert CheckpointFolder(tmp_path / "run" / "checkpoints").latest() == 8


def contents(checkpoint: Path) -> dict[str, torch.Tensor]:
    whole = checkpoint.with_suffix(".pt")
    dcp_to_torch_save(checkpoint, whole)
    return {name: x for name, x in flat(torch.load(whole)) if isinstance(x, torch.Tensor)}


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from flat(value, f"{prefix}{key}.")
    else:
        yield prefix, tree


def one_text(folder: Path) -> Path:
    text = next(corpus(folder).iterdir()).read_text()[: 44 * 32]
    path = folder / "one.txt"
    path.write_text(text)
    return path
