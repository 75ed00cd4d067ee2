"""Any rank killed at any moment, saves included: nothing that was confirmed is lost, and the run is the unbroken one.

Ranks are forked from a process that has imported everything, so a start costs a second and many moments can be tried.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import moetrain
import tests.support.zero  # noqa: F401 - before ranks are forked
from moetrain.checkpoint import CheckpointFolder
from moetrain.errors import LostRankError
from tests.support.runs import ROOT, corpus, environment, losses, overrides, run_config

pytestmark = pytest.mark.dist
STEPS = 12
# wherever the stop hit; tests/dist/test_stuck.py chooses
PLACE = r"(layers\.\d+|mtp\.\d+|the root|no layer|pipeline action)"
LAYOUTS = {
    "sharded": (2, ()),
    "spread experts": (2, ("parallel.ep=2",)),
    "stages": (2, ("parallel.pp=2",)),
    "saved in the background": (2, ("checkpoint.async_save=true",)),
    "ZeRO 3 on the host": (
        2,
        ("engine=deepspeed", "deepspeed.offload_optimizer=cpu", "deepspeed.offload_parameters=cpu"),
    ),
    "spread experts in stages": (4, ("parallel.pp=2", "parallel.ep=2")),
    "spread experts in copies": (4, ("parallel.dp_replicate=2", "parallel.ep=2")),
}


def slow(*values):
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def rank_main(rank, world, config, port, said):
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(os.open(f"{said}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    try:
        moetrain.train(config)
    except LostRankError as error:
        print(error, file=sys.stderr)
        os._exit(1)
    os._exit(0)


def start(world, config, said):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("fork")
    ranks = [context.Process(target=rank_main, args=(r, world, config, port, said), daemon=True) for r in range(world)]
    for process in ranks:
        process.start()
    return ranks


def end(ranks):
    """What torchrun does when a rank is gone: the others go, too."""
    for process in ranks:
        process.kill()
        process.join()


def confirmed(said: Path) -> int:
    text = said.read_text() if said.exists() else ""
    return max((int(step) for step in re.findall(r"checkpoint of step (\d+)", text)), default=0)


def config_of(folder, name, *more):
    return run_config("671B", folder, f"steps={STEPS}", "checkpoint.every=1", f"run_dir={folder / name}", *more)


def break_and_finish(folder, layout, kills, seed):
    """Kills ranks until ``kills`` are dead, then lets the run finish. Returns the run's folder."""
    world, more = LAYOUTS[layout]
    config = config_of(folder, f"broken-{seed}", *more)
    said = folder / f"said-{seed}.txt"
    r = random.Random(seed)
    dead = 0
    while True:
        before, length = confirmed(said), len(said.read_text()) if said.exists() else 0
        ranks = start(world, config, said)
        done = time.monotonic() + (r.uniform(0.2, 1.25 * world) if dead < kills else 90.0)
        while time.monotonic() < done and any(p.is_alive() for p in ranks):
            time.sleep(0.005)
        finished = all(p.exitcode == 0 for p in ranks)
        if not finished:
            assert dead < kills, f"a run that nobody killed did not finish: {[p.exitcode for p in ranks]}"
            os.kill(r.choice(ranks).pid, signal.SIGKILL)
            dead += 1
        end(ranks)
        resumed = re.findall(r"resumed after step (\d+)", said.read_text()[length:])  # of this start, if it came so far
        assert all(int(step) >= before for step in resumed), "a confirmed checkpoint was lost"
        if finished:
            return config.run_dir, dead


def unbroken(folder, layout):
    world, more = LAYOUTS[layout]
    config = config_of(folder, "whole", *more)
    ranks = start(world, config, folder / "whole.txt")
    for process in ranks:
        process.join(90)
    assert all(p.exitcode == 0 for p in ranks)
    return config.run_dir


def the_same(folder, broken):
    assert losses(broken) == losses(folder / "whole") and len(losses(broken)) == STEPS
    assert CheckpointFolder(broken / "checkpoints").latest() == STEPS


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layout", "kills"),
    [
        ("sharded", 1),
        ("saved in the background", 1),
        ("spread experts in stages", 1),
        ("ZeRO 3 on the host", 1),
        pytest.param("spread experts in copies", 1, marks=pytest.mark.slow),
        *(
            pytest.param(layout, 3, marks=pytest.mark.slow)
            for layout in ("sharded", "saved in the background", "spread experts", "stages")
        ),
    ],
)
def test_ranks_killed_at_any_moment_cost_nothing(tmp_path, layout, kills):
    unbroken(tmp_path, layout)
    broken, dead = break_and_finish(tmp_path, layout, kills=kills, seed=1)
    the_same(tmp_path, broken)
    assert dead >= 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fifty_killed_ranks_cost_nothing(tmp_path, layout):
    """With the seven layouts: three hundred and fifty moments."""
    unbroken(tmp_path, layout)
    dead, seed = 0, 100
    while dead < 50:
        broken, more = break_and_finish(tmp_path, layout, kills=min(10, 50 - dead), seed=seed)
        the_same(tmp_path, broken)
        dead, seed = dead + more, seed + 1


@pytest.mark.timeout(120)
@pytest.mark.parametrize("more", ["parallel.ep=2", "parallel.pp=2", "parallel.ep=1"])
def test_a_collective_that_waits_too_long_names_rank_collective_and_place(tmp_path, more):
    """One rank stops (and does not end); the other says where it waited, first as a warning and then as the reason."""
    config = config_of(tmp_path, "hung", "steps=2000", "checkpoint.every=0", "parallel.timeout_s=4", more)
    said = tmp_path / "said.txt"
    ranks = start(2, config, said)
    while "step 3/2000" not in (said.read_text() if said.exists() else ""):
        time.sleep(0.05)
        assert all(p.is_alive() for p in ranks)
    os.kill(ranks[1].pid, signal.SIGSTOP)
    ranks[0].join(60)
    assert ranks[0].exitcode == 1
    end(ranks)
    text = Path(f"{said}.0").read_text()
    assert re.search(rf"rank 0 has been in \w+ in {PLACE}.* for long: 3 s since step \d+", text), text
    assert re.search(rf"rank 0 lost another one during \w+ in {PLACE}.*, after step \d+ \(", text), text


#: the command line, with somebody's exception in a window of rank 1, while tokens are on their way
FAILING = """
import os, sys
from moetrain.__main__ import _main
from moetrain.model.layers import MLP
calls, forward = [], MLP.forward

def fails(self, *args, **kwargs):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 40:
        raise KeyError("somebody's hook")
    return forward(self, *args, **kwargs)

MLP.forward = fails
_main()
"""


def launched(folder, script, *arguments):
    """torchrun on two processes, each with its own $RANK in its command line. Returns exit code, text, seconds."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--master_port", str(29200 + os.getpid() % 140), "--no-python", "bash", "-c"]
    config = ["--config", str(ROOT / "configs" / "671B" / "smoke.yaml"), *overrides("671B", folder, "steps=2000")]
    started = time.monotonic()
    run = subprocess.run(
        [*command, f"exec {sys.executable} {script} {' '.join([*config, *arguments])}"],
        env=environment(), cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60,
    )  # fmt: skip
    return run.returncode, run.stdout, time.monotonic() - started


def test_a_data_file_that_one_rank_alone_lacks_ends_the_run_with_its_sentence(tmp_path):
    shutil.copytree(corpus(tmp_path), tmp_path / "rank0")
    code, said, seconds = launched(tmp_path, "-m moetrain", f"data.source={tmp_path}/rank$RANK")
    assert code != 0 and seconds < 30
    mine = f"data.source {tmp_path}/rank1 does not exist"
    assert f"moetrain: rank 1: {mine}" in said, said
    assert f"moetrain: rank 0 ends, since rank 1 ended with UserError: {mine}" in said, said
    assert said.index(mine) < said.index("Root Cause") and "[rank0]" not in said  # nobody else's traceback hides it


def test_a_mistake_of_every_rank_is_said_once(tmp_path):
    code, said, _ = launched(tmp_path, "-m moetrain", "data.source=nowhere")
    assert code != 0 and said.count("data.source nowhere does not exist") == 1 and said.count("moetrain: ") == 1, said


@pytest.mark.parametrize("layout", ["parallel.ep=2", *slow("parallel.pp=2", "parallel.ep=1")])
def test_an_exception_in_one_ranks_window_ends_the_others_within_seconds(tmp_path, layout):
    (tmp_path / "failing.py").write_text(FAILING)
    code, said, seconds = launched(tmp_path, tmp_path / "failing.py", layout)
    assert code != 0 and seconds < 30
    assert '[rank1]: KeyError: "somebody\'s hook"' in said, said
    assert 'moetrain: rank 0 ends, since rank 1 ended with KeyError: "somebody\'s hook"' in said, said


@pytest.mark.timeout(200)
def test_torchruns_restart_goes_on_by_itself(tmp_path):
    """The launch script with a rank that dies: the same command line ends with a whole run."""
    config = ["--config", str(ROOT / "configs" / "671B" / "smoke.yaml")]
    config += overrides("671B", tmp_path, "steps=40", "checkpoint.every=2")
    env = environment() | {
        "HEAD": "127.0.0.1", "NODES": "1", "GPUS": "2", "PYTHON": sys.executable, "RESTARTS": "2",
        "PORT": str(29350 + os.getpid() % 150), "RUN_ID": tmp_path.name,
    }  # fmt: skip
    node = subprocess.Popen(
        [str(ROOT / "docs" / "launch" / "torchrun.sh"), *config],
        env=env, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert node.stdout is not None
    said, killed = [], False
    for line in node.stdout:
        said.append(line)
        if not killed and "checkpoint of step 4" in line:
            victims = subprocess.run(["pgrep", "-f", f"run_dir={tmp_path}"], capture_output=True, text=True).stdout
            workers = [int(pid) for pid in victims.split() if int(pid) != node.pid and is_worker(int(pid))]
            os.kill(workers[-1], signal.SIGKILL)
            killed = True
    assert node.wait(60) == 0 and killed, "".join(said)
    assert any("resumed after step" in line for line in said)
    assert len(losses(tmp_path / "run")) == 40


def is_worker(pid: int) -> bool:
    try:
        environment_of = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return b"LOCAL_RANK=" in environment_of
