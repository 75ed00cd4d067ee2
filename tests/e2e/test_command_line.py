"""The command line as a person meets it: help, one sentence for a mistake, exit codes."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMOKE = "configs/671B/smoke.yaml"


def moetrain(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "moetrain", *arguments]
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=100)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["train", "--help"]])
def test_help_shows_a_command_that_works(arguments: list[str]) -> None:
    run = moetrain(*arguments)
    assert run.returncode == 0 and run.stderr == ""
    assert f"python -m moetrain --config {SMOKE}" in run.stdout
    assert (ROOT / SMOKE).exists()


def test_version() -> None:
    import moetrain as package

    run = moetrain("--version")
    assert (run.returncode, run.stdout) == (0, f"moetrain {package.__version__}\n")


@pytest.mark.parametrize(
    ("arguments", "fragment"),
    [
        (["trian", "--config", SMOKE], "unknown command 'trian'; did you mean train?"),
        (["optimizer.lr=1"], "--config"),
        (["--config", "configs/nowhere"], "there is no file configs/nowhere"),
        (["--config", SMOKE, "optimizer.lrr=1"], "unknown key `optimizer.lrr`; did you mean `optimizer.lr`?"),
        (["--config", SMOKE, "steps"], "must have the form key=value"),
        (["--config", SMOKE, "--fast"], "unrecognized arguments: --fast"),
        (["train", "--config", SMOKE, "steps=0"], "`steps` must be greater than 0"),
        (["tokenize", "texts"], "the following arguments are required: --out"),
        (["tokenize", "texts", "--out", "x", "--workers", "0"], "--workers must be at least 1, not 0"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments: list[str], fragment: str) -> None:
    run = moetrain(*arguments)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith("moetrain: ") and run.stderr.count("\n") == 1
    assert fragment in run.stderr


def test_a_rank_whose_mistake_nobody_else_has_made_says_which_one_it_is() -> None:
    run = moetrain("--config", "nowhere", RANK="1", WORLD_SIZE="2")
    assert (run.returncode, run.stdout) == (2, "") and run.stderr.startswith("moetrain: rank 1: ")


def test_the_full_model_is_refused_at_once_where_it_cannot_run() -> None:
    run = moetrain("--config", "configs/671B")
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith("moetrain: configs/671B needs ") and run.stderr.count("\n") == 1
    assert f"python -m moetrain --config {SMOKE}" in run.stderr


def test_what_does_not_work_yet_is_refused() -> None:
    run = moetrain("--config", SMOKE, "parallel.cp=2")
    assert run.returncode == 2
    assert "parallel.cp: 2 does not work yet" in run.stderr


def test_an_interrupt_ends_with_130(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    os.mkfifo(config)  # reading it waits for a writer, so the process is surely at work when the signal comes
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "moetrain", "--config", str(config)]
    # a shell's background job ignores the interrupt, and hands that on: the process here shall be a person's
    as_a_person = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env, preexec_fn=as_a_person
    ) as process:
        writer = os.open(config, os.O_WRONLY)
        process.send_signal(signal.SIGINT)
        try:
            _, stderr = process.communicate(timeout=30)
        finally:
            os.close(writer)
            process.kill()
    assert (process.returncode, stderr) == (130, "moetrain: interrupted\n")
