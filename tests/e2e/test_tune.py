"""``tune`` finds the micro-batch that trial by hand finds: whole runs, size by size, under the shell's ``ulimit``."""

from __future__ import annotations

import functools
import os
import shlex
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from moetrain import load_config
from moetrain.config import RunConfig
from tests.support.runs import ROOT, environment, overrides

pytestmark = pytest.mark.dist
SMOKE = ROOT / "configs" / "671B" / "smoke.yaml"
MIB = 2**20


@pytest.fixture(scope="module")
def base() -> int:
    """Bytes that count towards the limit once the program is there: another torch has another number."""
    code = "import moetrain.trainer; from moetrain.trial import _status; print(_status()['VmData'])"
    return int(subprocess.check_output([sys.executable, "-c", code], env=environment(), text=True))


def keys(folder: Path, *more: str) -> list[str]:
    """Long sequences in a small model: what a micro-batch needs is large beside what the program does."""
    return overrides("671B", folder, "data.seq_len=1024", "steps=2", "checkpoint.resume=never", *more)


def by_hand(folder: Path, limit: int, *more: str, processes: int = 1) -> bool:
    """Whether a whole run survives; a run that does not has to say that it lacks memory."""
    launch = ["torch.distributed.run", "--nproc_per_node", str(processes), "-m"] if processes > 1 else []
    command = [sys.executable, "-m", *launch, "moetrain", "--config", str(SMOKE), *keys(folder, *more)]
    limited = f"ulimit -d {limit // 1024}; exec {shlex.join(command)}"
    ran = subprocess.run(["sh", "-c", limited], env=environment(), capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0 or "can't allocate memory" in ran.stderr, ran.stderr
    return ran.returncode == 0


def tune(folder: Path, limit: int, *more: str, options: tuple[str, ...] = ()) -> tuple[RunConfig, str]:
    command = [sys.executable, "-m", "moetrain", "tune", "--config", str(SMOKE), "--memory", str(limit), *options]
    command += ["--out", str(folder / "tuned.yaml"), *keys(folder, *more)]
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    return load_config(folder / "tuned.yaml"), ran.stdout


def largest(said: str, recompute: str) -> int:
    """Of what fits, from the lines of the trials."""
    lines = [line for line in said.splitlines() if line.startswith("trial ") and f"recompute={recompute}:" in line]
    return max(int(line.split("micro_batch=")[1].split()[0]) for line in lines if "does not fit" not in line)


def micro_batches(share: int, size: int) -> int:
    return -(-share // size)


def by_hand_largest(share: int, found: dict[int, bool]) -> int:
    """Fewest micro-batches that survived by hand, and the smallest size that makes so few."""
    assert found[1], "the limit is too low to show anything"
    fewest = min(micro_batches(share, size) for size, survived in found.items() if survived)
    return min(size for size in found if micro_batches(share, size) == fewest)


@pytest.mark.timeout(300)  # 46 s of CPU time, on as many cores as are free
def test_tune_finds_what_trial_by_hand_finds(tmp_path, base):
    limit, batch = base + 145 * MIB, "batch={global_batch: 4, micro_batch: 1}"
    with ThreadPoolExecutor(1) as beside:
        tuned = beside.submit(tune, tmp_path, limit, batch, options=("--recompute", "none", "--steps", "1"))
        found = {size: by_hand(tmp_path / str(size), limit, batch, f"batch.micro_batch={size}") for size in range(1, 5)}
        config, said = tuned.result()
    assert largest(said, "none") == by_hand_largest(4, found) < 4
    assert found[config.batch.micro_batch] and config.batch.global_batch == 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_with_two_processes_too(tmp_path, base):
    """Experts over both; 8 sequences are 4 a rank."""
    limit, more = base + 210 * MIB, ("batch={global_batch: 8, micro_batch: 1}", "parallel.ep=2")
    found = {
        size: by_hand(tmp_path / str(size), limit, *more, f"batch.micro_batch={size}", processes=2)
        for size in range(1, 5)
    }
    _, said = tune(tmp_path, limit, *more, options=("--recompute", "none", "--steps", "1", "--processes", "2"))
    assert largest(said, "none") == by_hand_largest(4, found) < 4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_recompute_makes_room_that_trial_by_hand_finds_too(tmp_path, base):
    limit, batch = base + 145 * MIB, "batch={global_batch: 4, micro_batch: 1}"
    _, said = tune(tmp_path, limit, batch, options=("--recompute", "none,full", "--steps", "1"))
    sizes = []
    for recompute in ("none", "full"):
        keys = (batch, f"parallel.recompute={recompute}")
        with ThreadPoolExecutor(2) as pool:
            survived = pool.map(
                lambda size, keys=keys: by_hand(tmp_path / str(size), limit, *keys, f"batch.micro_batch={size}"),
                range(1, 5),
            )
            sizes.append(by_hand_largest(4, dict(enumerate(survived, start=1))))
        assert largest(said, recompute) == sizes[-1]
    assert sizes[0] < sizes[1]


@pytest.mark.slow
def test_what_fits_nowhere_and_what_is_wrong_ends_in_a_sentence(tmp_path):
    command = [sys.executable, "-m", "moetrain", "tune", "--config", str(SMOKE), "--out", str(tmp_path / "t.yaml")]
    for more, sentence in (
        (["--memory", "150MiB", "--recompute", "none"], "does not fit here, not even with batch.micro_batch=1"),
        (["init_from=/nowhere", "--recompute", "none"], "/nowhere"),
        (["--memory", "much"], "--memory: 'much' is not a size; write it as 3GiB"),
        (["--recompute", "some"], "--recompute: there is none, selective, full, and no 'some'"),
    ):
        ran = subprocess.run([*command, *more], env=environment(), capture_output=True, text=True, timeout=100)
        assert ran.returncode == 2 and sentence in ran.stderr and ran.stderr.count("\n") == 1, ran.stderr
    assert not (tmp_path / "t.yaml").exists()


def test_ctrl_c_leaves_the_best_so_far_and_no_process(tmp_path):
    command = [sys.executable, "-u", "-m", "moetrain", "tune", "--config", str(SMOKE), "--steps", "1"]
    command += ["--out", str(tmp_path / "tuned.yaml"), *keys(tmp_path)]
    # a shell that starts tests in the background lets them, and what they start, ignore interrupts
    as_a_person = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    tuning = subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=as_a_person,
    )  # fmt: skip
    assert tuning.stdout is not None
    for line in tuning.stdout:
        if line.startswith("trial 1: "):
            break
    os.kill(tuning.pid, signal.SIGINT)
    said, complaints = tuning.communicate(timeout=60)
    assert tuning.returncode == 130 and complaints == "moetrain: interrupted\n", complaints
    assert "proposed: micro_batch=1" in said
    assert load_config(tmp_path / "tuned.yaml").batch.micro_batch == 1
