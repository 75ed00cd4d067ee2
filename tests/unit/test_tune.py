"""The parts of ``tune``: which sizes are looked at, in which order, what is taken, and what a trial's end means."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from moetrain.config import load_config
from moetrain.config.load import to_yaml
from moetrain.config.values import bytes_of
from moetrain.errors import UserError
from moetrain.planning.trials import Measured, Runner, shortage
from moetrain.planning.tune import Trial, Tuner, best, largest, seconds_of, sizes_of
from tests.support.runs import ROOT, SCALES, environment

SMOKE = ROOT / "configs" / "671B" / "smoke.yaml"


def test_only_the_smallest_size_of_each_number_of_micro_batches_is_looked_at():
    assert sizes_of(8) == [1, 2, 3, 4, 8]
    for share in range(1, 60):
        numbers = {-(-share // size) for size in range(1, share + 1)}
        smallest = {number: min(s for s in range(1, share + 1) if -(-share // s) == number) for number in numbers}
        assert sizes_of(share) == sorted(smallest.values())


@pytest.mark.parametrize("share", [1, 2, 7, 16, 256])
def test_the_search_finds_the_boundary_from_every_start(share):
    sizes = sizes_of(share)
    for most in [0, *sizes]:
        for start in range(len(sizes)):
            tried = []
            found = largest(sizes, lambda size, most=most, tried=tried: tried.append(size) or size <= most, start)
            assert found == (sizes.index(most) if most else -1)
            assert len(tried) == len(set(tried)) <= 2 * len(sizes).bit_length() + 3


def test_sizes_double_until_one_fails_and_then_halve_the_gap():
    tried = []
    largest(sizes_of(64), lambda size: tried.append(size) or size <= 11)
    assert tried[:5] == [1, 2, 4, 8, 16] and all(8 < size < 16 for size in tried[5:])


def test_a_right_guess_costs_two_trials():
    tried = []
    sizes = sizes_of(64)
    assert largest(sizes, lambda size: tried.append(size) or size <= 8, sizes.index(8)) == sizes.index(8)
    assert len(tried) == 2


def trial(size, tokens, held=1, equal=True, recompute="none"):
    return Trial(size, recompute, 8, equal, Measured(held, held, held, 0, (1.0,)), tokens)


def test_the_fastest_is_proposed_and_not_the_largest():
    assert best([trial(1, 90), trial(2, 120), trial(4, 100)]).size == 2
    assert best([Trial(2, "none", 8, True, "out of memory"), trial(1, 50)]).size == 1
    assert best([Trial(2, "none", 8, True, "out of memory")]) is None


def test_of_equals_equal_micro_batches_are_proposed_and_then_less_memory():
    assert best([trial(3, 101, equal=False), trial(2, 100), trial(4, 100, held=2)]).size == 2


def test_time_of_a_long_window_lies_on_the_line_through_two_short_ones():
    assert seconds_of(4, [4], [2.0]) == 2.0
    assert seconds_of(100, [8, 4], [1.0 + 8 * 0.5, 1.0 + 4 * 0.5]) == pytest.approx(1.0 + 100 * 0.5)
    assert seconds_of(80, [8, 4], [4.0, 4.5]) == pytest.approx(40.0)  # noise: the shorter one took longer


@pytest.mark.parametrize(
    ("text", "size"), [("3GiB", 3 * 2**30), ("800MB", 8e8), ("3e9", 3e9), ("1.5g", 1.5e9), ("512 KiB", 2**19)]
)
def test_sizes_are_read_with_their_units(text, size):
    assert bytes_of(text) == size


@pytest.mark.parametrize("text", ["", "much", "3XB", "-1GiB", "0", "1.2.3GB"])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(ValueError, match=r"write it as 3GiB"):
        bytes_of(text)


def test_torchs_and_pythons_words_for_no_memory_are_known():
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**58, dtype=torch.uint8)
    assert shortage(str(error.value)) == f"out of memory, asking for {2**38:,.1f} MiB"
    with pytest.raises(MemoryError) as none:
        bytearray(2**62)
    assert shortage(f"{type(none.value).__name__}: {none.value}") == "out of memory: MemoryError:"
    cuda = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of"
    assert shortage(cuda) == "out of memory, asking for 2.00 GiB"
    assert shortage("terminate called after throwing an instance of 'std::bad_alloc'").startswith("out of memory")
    assert shortage("ValueError: the batch is empty\nRuntimeError: shapes differ") == ""


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("file", ["config.yaml", "smoke.yaml"])
def test_what_is_written_is_read_as_the_same_run(scale, file, tmp_path):
    keys = ["batch.micro_batch=2", "parallel.recompute=full"]
    config = load_config(ROOT / "configs" / scale / file, keys)
    written = tmp_path / "tuned.yaml"
    written.write_text(to_yaml(config, "where it is from\nand how fast"))
    assert written.read_text().startswith("# where it is from\n# and how fast\n")
    assert load_config(written) == config


class Pretended(Runner):
    """A runner whose ranks run a line of Python instead of the trainer."""

    def _command(self, folder, overrides, windows):
        code = f"import os, sys, time, json; rank = os.environ.get('RANK', '0'); folder = {folder!r}\n"
        return [sys.executable, "-c", code + "\n".join(overrides)]


def say(**what):
    return f"open(f'{{folder}}/rank.{{rank}}', 'a').write(json.dumps({what!r}) + chr(10))"


MEASURED = {"peak": 1, "held": 2, "counted": 3, "have": 4, "seconds": [0.5]}


def runner(processes=1, timeout=20.0):
    return Pretended(Path("config"), processes, on_gpu=False, limit=None, timeout=timeout, steps=1)


def children(pid):
    """Processes that ``pid`` has started and that still run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may end meanwhile
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                found.append(int(folder.name))
    return sorted(found)


def run(each, *code):
    before = children(os.getpid())
    try:
        return each.run(list(code), [1], lambda what: None)
    finally:
        assert children(os.getpid()) == before


def test_what_ranks_measured_is_the_largest_of_each():
    more = {**MEASURED, "peak": 7, "seconds": [0.25]}
    outcome = run(runner(2), f"if rank == '0': {say(measured=MEASURED)}", f"else: {say(measured=more)}")
    assert outcome == Measured(7, 2, 3, 4, (0.5,))


def test_a_rank_that_the_system_kills_does_not_fit_and_ends_the_others():
    outcome = run(runner(2), "if rank == '1': os.kill(os.getpid(), 9)", "time.sleep(60)")
    assert outcome == "rank 1: killed by the system (SIGKILL), which ends processes when memory is short"


def test_memory_is_the_reason_also_where_another_rank_was_the_first_to_complain():
    lost = {"kind": "lost", "text": "RuntimeError: connection closed by peer"}
    short = {"kind": "memory", "text": "out of memory, asking for 3.0 MiB"}
    code = (f"if rank == '0': {say(error=lost)}; sys.exit(1)", f"time.sleep(1); {say(error=short)}; sys.exit(1)")
    assert run(runner(2), *code) == "rank 1: out of memory, asking for 3.0 MiB"


def test_a_process_that_dies_in_c_plus_plus_for_memory_does_not_fit():
    outcome = run(runner(), "print('terminate: std::bad_alloc', file=sys.stderr, flush=True)", "os.abort()")
    assert outcome == "out of memory: terminate: std::bad_alloc"


def test_a_trial_that_hangs_is_ended_and_said_where_it_was():
    start = time.monotonic()
    outcome = run(runner(2, timeout=2.0), say(reached="step 1"), "time.sleep(60)")
    assert outcome == "no progress for 2 s (after step 1)" and time.monotonic() - start < 20


def test_another_error_is_the_users_to_read():
    mistake = {"kind": "user", "text": "deepspeed.json_file: there is no such file"}
    with pytest.raises(UserError, match=r"^deepspeed.json_file: there is no such file$"):
        run(runner(), say(error=mistake), "sys.exit(1)")
    fault = {"kind": "fault", "text": "ValueError: shapes differ"}
    with pytest.raises(UserError, match="a trial ended with an error of its own: ValueError: shapes differ"):
        run(runner(), say(error=fault), "sys.exit(1)")
    with pytest.raises(UserError, match="ended with code 3, and not for memory: no such library"):
        run(runner(), "print('no such library', file=sys.stderr)", "sys.exit(3)")


def test_trials_end_with_whoever_started_them(tmp_path):
    """Also where that is killed and can do nothing any more."""
    code = (
        "import sys; from pathlib import Path; from moetrain.planning.trials import Runner\n"
        f"Runner(Path({str(SMOKE)!r}), 1, False, None, 60, 1).run(['steps=3'], [4], print)"
    )
    starter = subprocess.Popen([sys.executable, "-c", code], env=environment(), start_new_session=True)
    deadline = time.monotonic() + 60

    while not (running := children(starter.pid)) and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(1)  # the trial has begun to watch
    starter.kill()
    starter.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in running) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert running and not any(Path(f"/proc/{pid}").exists() for pid in running)


class Machine(Tuner):
    """Trials that cost nothing: each process needs so many bytes a sequence, and time as it is given."""

    needs = {"none": 100, "selective": 80, "full": 30}  # noqa: RUF012
    speeds = {"none": 10.0, "selective": 9.0, "full": 7.0}  # noqa: RUF012

    def trial(self, size, recompute):
        for each in self.trials:
            if (each.size, each.recompute) == (size, recompute):
                return each
        bytes_ = 50 + size * self.needs[recompute]
        measured = Measured(bytes_, bytes_, bytes_, self.limit, (1.0,))
        outcome = measured if bytes_ <= self.limit else "out of memory"
        tokens = self.speeds[recompute] * size / (size + 1)
        done = Trial(size, recompute, -(-self.share // size), self.share % size == 0, outcome, tokens)
        self.trials.append(done)
        return done

    def _plan(self, size, recompute):
        return None


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (10_000, (16, "none")),  # everything fits at once: no recompute is tried
        (900, (8, "none")),
        (200, (4, "full")),  # 7 * 4/5 is faster than one sequence without recompute
        (60, None),
    ],
)
def test_recompute_is_taken_where_the_larger_micro_batch_is_worth_it(limit, expected, capsys):
    tuner = Machine(SMOKE, ["parallel.world_size=null"], processes=1, limit=limit)
    tuner.run()
    found = best(tuner.trials)
    assert (found and (found.size, found.recompute)) == expected
    if limit == 10_000:
        assert {each.recompute for each in tuner.trials} == {"none"}


def test_the_plan_saves_trials_and_decides_nothing(capsys):
    class Foretold(Machine):
        factor = 1.0

        def _plan(self, size, recompute):
            return int(size * self.needs[recompute] * self.factor)

    counts = {}
    for kind, factor in ((Machine, 1.0), (Foretold, 1.0), (Foretold, 0.2), (Foretold, 5.0)):
        tuner = kind(SMOKE, ["batch={global_batch: 64, micro_batch: 1}"], processes=1, limit=2300)
        tuner.factor = factor
        tuner.run()
        fitting = [(each.recompute, each.size) for each in tuner.trials if each.fits]
        assert {name: max(size for r, size in fitting if r == name) for name in Machine.needs} == {
            "none": 22, "selective": 22, "full": 64,
        }  # fmt: skip
        counts[kind, factor] = len(tuner.trials)
    assert counts[Foretold, 1.0] < counts[Machine, 1.0]


def test_a_recompute_that_the_config_cannot_have_is_left_out(capsys):
    keys = ["parallel.offload_activations=true"]
    tuner = Machine(SMOKE, keys, processes=1, limit=200)
    tuner.run()
    assert "recompute=selective is left out: override parallel.offload_activations=true" in capsys.readouterr().out
    assert {each.recompute for each in tuner.trials} == {"none", "full"}


def test_under_torchrun_it_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="start it without torchrun, with --processes"):
        Tuner(SMOKE, [])


@pytest.mark.parametrize(("out", "says"), [("nowhere/tuned.yaml", "a folder that is not there"), (".", "a folder")])
def test_a_place_that_nothing_can_be_written_to_is_said_before_the_first_trial(out, says, capsys, tmp_path):
    from moetrain.__main__ import main

    config = Path(__file__).parents[2] / "configs" / "671B" / "smoke.yaml"
    assert main(["tune", "--config", str(config), "--out", str(tmp_path / out)]) == 2
    assert says in capsys.readouterr().err
