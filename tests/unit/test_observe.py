"""The log: every step once, whatever happens to disks and terminals."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest

from moetrain.__main__ import main
from moetrain.errors import UserError
from moetrain.observe import RunLog, peak_flops
from moetrain.observe.report import report


def record(step, **more):
    return {"step": step, "tokens": step * 100, "loss": 3.0, "lr": 1e-3, "grad_norm": 0.5, **more}


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def log(folder, **more):
    return RunLog(folder, **{"rank": 0, "total_steps": 10, "tensorboard": False, **more})


def test_a_step_is_one_line_in_the_file_and_one_on_the_console(tmp_path, capsys):
    with log(tmp_path) as run:
        run.start({"model": "small"})
        run.step(record(1))
        run.evaluation({"step": 1, "eval_loss": 2.5, "perplexity": 12.2})
    train, evaluation = lines(tmp_path)
    assert train["kind"] == "train" and train["step"] == 1 and train["loss"] == 3.0 and train["tokens_per_s"] > 0
    assert evaluation["kind"] == "eval" and evaluation["perplexity"] == 12.2
    out = capsys.readouterr().out
    assert "step 1/10  loss 3.0000  lr 1.00e-03  |g| 0.50" in out and "held out: loss 2.5000" in out


def test_other_ranks_say_and_write_nothing(tmp_path, capsys):
    with log(tmp_path / "x", rank=1) as run:
        run.start({"model": "small"})
        run.step(record(1))
        run.note("hello")
    assert capsys.readouterr().out == "" and not (tmp_path / "x").exists()


def test_steps_that_are_taken_again_are_not_logged_twice(tmp_path):
    with log(tmp_path) as run:
        for step in range(1, 6):
            run.step(record(step))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 6, "lo')  # killed in the middle of a line
    with log(tmp_path) as run:
        run.resume_at(3)
        run.step(record(4))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]


def test_a_number_that_is_none_is_null(tmp_path):
    with log(tmp_path) as run:
        run.step(record(1, loss=float("nan"), grad_norm=float("inf")))
    assert lines(tmp_path)[0]["loss"] is None and lines(tmp_path)[0]["grad_norm"] is None


def test_speed_leaves_out_what_is_not_training(tmp_path):
    with log(tmp_path) as run:
        run.start({})
        run.step(record(1))
        time.sleep(0.3)
        run.evaluation({"step": 1, "eval_loss": 1.0})
        run.step(record(2))
    assert lines(tmp_path)[2]["step_s"] < 0.1


def test_a_resumed_run_counts_only_its_own_tokens(tmp_path):
    with log(tmp_path) as run:
        run.start({}, step=8, tokens=800)
        time.sleep(0.05)
        done = run.step(record(9))
    assert done["tokens_per_s"] < 100 / 0.05


def test_a_full_disk_costs_the_record_and_is_said_once(tmp_path, capsys):
    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    with log(tmp_path) as run:
        run._file.close()
        run._file = Full()
        run.step(record(1))
        run.step(record(2))
    assert capsys.readouterr().out.count("cannot be written (No space left on device)") == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_a_really_full_disk_does_not_end_the_run_at_its_close_either(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with log(tmp_path) as run:
        run.step(record(1))
        run.step(record(2))
    out = capsys.readouterr().out
    assert out.count("cannot be written (No space left on device)") == 1 and "step 2/10" in out


def test_resuming_on_a_full_disk_keeps_the_records_there_are(tmp_path, capsys, monkeypatch):
    with log(tmp_path) as run:
        for step in range(1, 4):
            run.step(record(step))

    def full(self, data, **more):
        open(self, "w").close()  # as a full disk does: the file is emptied, then nothing fits
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with log(tmp_path) as run:
        run.resume_at(1)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    assert "cannot be written" in capsys.readouterr().out


def test_a_record_whose_line_was_not_ended_keeps_its_own_line(tmp_path):
    with log(tmp_path) as run:
        run.step(record(1))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text().rstrip("\n"))
    with log(tmp_path) as run:
        run.resume_at(1)
        run.step(record(2))
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_without_tensorboard_there_are_simply_no_such_files(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)  # importing it raises ImportError
    with log(tmp_path, tensorboard=True) as run:
        run.step(record(1))
    assert len(lines(tmp_path)) == 1 and not (tmp_path / "tensorboard").exists()


def test_a_closed_terminal_does_not_end_the_run(tmp_path, monkeypatch):
    def gone(*args, **kwargs):
        raise BrokenPipeError

    with log(tmp_path) as run:
        monkeypatch.setattr("builtins.print", gone)
        run.step(record(1))
        run.step(record(2))
    assert len(lines(tmp_path)) == 2


def test_tensorboard_gets_the_numbers_where_it_is_installed(tmp_path):
    pytest.importorskip("tensorboard")
    with log(tmp_path, tensorboard=True) as run:
        run.step(record(1))
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_mfu_only_where_the_peak_is_known(tmp_path):
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12 and peak_flops("NVIDIA GB200") == 2.5e15
    assert peak_flops("AMD EPYC") is None
    with log(tmp_path) as run:
        assert "mfu" not in run.step(record(1))
        assert run.step(record(2), mfu_per_rate=1e-9)["mfu"] > 0


def test_a_report_sums_a_run_up(tmp_path, capsys):
    with log(tmp_path) as run:
        for step in range(1, 4):
            run.step(record(step, loss=4.0 - step, max_violation=0.25))
        run.evaluation({"step": 3, "eval_loss": 1.5, "perplexity": 4.48})
    capsys.readouterr()
    report(tmp_path)
    out = capsys.readouterr().out
    assert "3.0000" in out and "1.0000" in out and "4.48" in out and "300" in out


def test_a_report_of_a_run_that_diverged_says_so(tmp_path, capsys):
    with log(tmp_path) as run:
        run.step(record(1, loss=2.0))
        run.step(record(2, loss=float("nan")))
        run.evaluation({"step": 2, "eval_loss": 800.0, "perplexity": float("inf")})
    capsys.readouterr()
    report(tmp_path)
    out = capsys.readouterr().out
    assert "2.0000 (step 1)" in out and "not finite" in out and "200" in out and "800.0000" in out


def test_the_command_line_reports(tmp_path, capsys):
    with log(tmp_path) as run:
        run.step(record(1))
    assert main(["report", str(tmp_path)]) == 0 and "loss, best" in capsys.readouterr().out
    assert main(["report", str(tmp_path / "none")]) == 2 and "no metrics.jsonl" in capsys.readouterr().err


def test_a_report_of_nothing_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"no metrics\.jsonl"):
        report(tmp_path)


def test_a_run_dir_that_cannot_be_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run_dir .*file cannot be written \(File exists\)"), log(tmp_path / "file"):
        pass
