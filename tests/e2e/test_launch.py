"""The launch script, as two nodes on this machine that meet at a port of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from moetrain.checkpoint import CheckpointFolder
from tests.support.runs import ROOT, environment, losses, overrides

pytestmark = pytest.mark.dist


def test_two_nodes_find_each_other_and_train_one_run(tmp_path):
    config = ["--config", str(ROOT / "configs" / "671B" / "smoke.yaml"), *overrides("671B", tmp_path, "steps=2")]
    env = environment() | {
        "HEAD": "127.0.0.1", "NODES": "2", "GPUS": "1", "PYTHON": sys.executable,
        "PORT": str(29800 + os.getpid() % 150), "RUN_ID": tmp_path.name,
    }  # fmt: skip
    script = str(ROOT / "docs" / "launch" / "torchrun.sh")
    nodes = [
        subprocess.Popen(
            [script, *config], env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(2)
    ]
    said = [node.communicate(timeout=100)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert sum("FSDP2 over 2 ranks" in text for text in said) == 1 and len(losses(tmp_path / "run")) == 2


def test_sigterm_to_the_launcher_saves_before_it_leaves(tmp_path):
    config = ["--config", str(ROOT / "configs" / "671B" / "smoke.yaml"), *overrides("671B", tmp_path, "steps=2000")]
    env = environment() | {
        "HEAD": "127.0.0.1", "NODES": "1", "GPUS": "2", "PYTHON": sys.executable,
        "PORT": str(29650 + os.getpid() % 150), "RUN_ID": tmp_path.name,
    }  # fmt: skip
    script = str(ROOT / "docs" / "launch" / "torchrun.sh")
    node = subprocess.Popen(
        [script, *config], env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert node.stdout is not None
    for line in node.stdout:
        if "step 3/2000" in line:
            break
    node.send_signal(signal.SIGTERM)
    said = node.communicate(timeout=60)[0]
    assert "stopped by SIGTERM after step" in said, said
    step = CheckpointFolder(tmp_path / "run" / "checkpoints").latest()
    assert step is not None and step >= 3


def test_accelerate_launches_it_too(tmp_path):
    """Both engines; one process, since ``accelerate launch`` on CPU starts no more."""
    for engine in ("native", "deepspeed"):
        given = overrides("671B", tmp_path / engine, "steps=2", f"engine={engine}", "precision=fp32")
        module = ["-m", "moetrain", "--config", str(ROOT / "configs" / "671B" / "smoke.yaml"), *given]
        launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
        subprocess.run([*launch, *module], env=environment(), cwd=tmp_path, check=True, capture_output=True)
    assert losses(tmp_path / "deepspeed" / "run") == pytest.approx(losses(tmp_path / "native" / "run"), rel=1e-5)


def test_the_slurm_script_is_a_shell_script_that_names_what_it_needs():
    path = ROOT / "docs" / "launch" / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True)
    ran = subprocess.run([str(ROOT / "docs" / "launch" / "torchrun.sh")], capture_output=True, text=True)
    assert ran.returncode != 0 and "the host where the nodes meet" in ran.stderr
