"""Runs from the command line: they learn, and neither a kill nor SIGTERM loses anything."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from moetrain.checkpoint import CheckpointFolder
from moetrain.errors import UserError
from moetrain.model import FreshWeights
from moetrain.trainer import train
from tests.support.runs import ROOT, SCALES, environment, losses, overrides, records, run_config

COMMON = ("checkpoint.every=2", "eval.every=4", "steps=8")


def start(scale: str, folder: Path, *more: str, launcher: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", *launcher, "moetrain", "--config", str(ROOT / "configs" / scale / "smoke.yaml")]
    return subprocess.Popen(
        [*command, *overrides(scale, folder, *more)],
        env=environment(),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"the run ended without {text!r}")


def shards(run_dir: Path, step: int) -> dict[str, bytes]:
    folder = run_dir / "checkpoints" / f"step_{step:08d}"
    return {p.name: p.read_bytes() for p in sorted(folder.glob("*.distcp"))}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unbroken")
    torch.set_num_threads(1)
    train(run_config("671B", folder, *COMMON))
    return folder / "run"


def test_a_run_learns_evaluates_and_writes_what_it_did(unbroken):
    found = records(unbroken)
    assert [r["step"] for r in found] == list(range(1, 9))
    assert found[-1]["loss"] < found[0]["loss"]
    assert found[0]["tokens"] == 16 * 32 and found[-1]["lr"] > 0
    assert {"lm", "mtp_1", "balance", "total", "grad_norm", "max_violation", "tokens_per_s"} <= found[0].keys()
    assert [r["step"] for r in records(unbroken, "eval")] == [4, 8]
    assert CheckpointFolder(unbroken / "checkpoints").latest() == 8


def test_killed_and_started_again_it_is_the_run_that_was_not_killed(tmp_path, unbroken):
    process = start("671B", tmp_path, *COMMON)
    wait_for(process, "step 5/8")
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = start("671B", tmp_path, *COMMON)
    out, _ = again.communicate(timeout=100)
    assert again.returncode == 0 and "resumed after step 4" in out
    assert losses(tmp_path / "run") == losses(unbroken)
    assert shards(tmp_path / "run", 8) == shards(unbroken, 8), "not bit for bit"


def test_a_run_that_goes_on_draws_no_weights_first(tmp_path, unbroken, monkeypatch):
    """671 billion of them take up to an hour, and the checkpoint overwrites them all."""
    shutil.copytree(unbroken, tmp_path / "run")

    def draw(*args: object) -> None:
        raise AssertionError("weights were drawn")

    monkeypatch.setattr(FreshWeights, "fill", draw)
    train(run_config("671B", tmp_path, *COMMON, "steps=9"))
    assert records(tmp_path / "run")[-1]["step"] == 9


def test_sigterm_saves_and_the_same_command_goes_on(tmp_path, unbroken):
    process = start("671B", tmp_path, *COMMON, "checkpoint.every=0")
    wait_for(process, "step 3/8")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "stopped by SIGTERM after step" in out
    assert (stopped := CheckpointFolder(tmp_path / "run" / "checkpoints").latest()) is not None and 3 <= stopped < 8
    train(run_config("671B", tmp_path, *COMMON, "checkpoint.every=0"))
    assert losses(tmp_path / "run") == losses(unbroken)
    assert shards(tmp_path / "run", 8) == shards(unbroken, 8)


def test_torchrun_starts_it_and_rank_0_alone_speaks(tmp_path):
    launcher = ("torch.distributed.run", "--nproc_per_node", "2", "--master_port", str(29500 + os.getpid() % 400), "-m")
    process = start("671B", tmp_path, "steps=2", launcher=launcher)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out
    assert out.count("step 2/2  loss") == 1 and "FSDP2 over 2 ranks" in out


@pytest.mark.parametrize("scale", SCALES)
def test_a_finished_run_started_again_says_so_and_changes_nothing(tmp_path, scale):
    config = run_config(scale, tmp_path, "steps=2")
    train(config)
    before = (config.run_dir / "metrics.jsonl").read_text()
    time.sleep(0.01)
    assert train(config).steps == 2
    assert (config.run_dir / "metrics.jsonl").read_text() == before


def test_a_hugging_face_folder_is_where_a_run_starts(tmp_path):
    from moetrain import save_pretrained
    from moetrain.model import DeepSeek

    config = run_config("671B", tmp_path, "steps=2")
    for seed in (config.seed, 99):
        model = DeepSeek(config.model)
        model.init_weights(seed)
        save_pretrained(model, tmp_path / f"hf{seed}")
    train(run_config("671B", tmp_path / "fresh", "steps=2"))
    for seed in (config.seed, 99):
        train(run_config("671B", tmp_path / f"from{seed}", "steps=2", f"init_from={tmp_path / f'hf{seed}'}"))
    fresh, same, other = (losses(tmp_path / name / "run") for name in ("fresh", f"from{config.seed}", "from99"))
    assert same == fresh and other != fresh  # the folder decides, bit for bit


def test_a_damaged_checkpoint_is_passed_over_and_said(tmp_path, capsys, unbroken):
    train(run_config("671B", tmp_path, *COMMON, "steps=4"))
    broken = tmp_path / "run" / "checkpoints" / "step_00000004" / "extra.pt"
    broken.write_bytes(broken.read_bytes()[:-7])
    train(run_config("671B", tmp_path, *COMMON))
    assert "passed over, going on from step 2" in capsys.readouterr().out
    assert losses(tmp_path / "run") == losses(unbroken)


def test_a_run_that_only_makes_nan_ends_in_a_sentence_and_keeps_its_checkpoint(tmp_path):
    train(run_config("671B", tmp_path, "steps=2", "checkpoint.every=1"))
    with pytest.raises(UserError, match=r"20 windows in a row were discarded after step 2 .*lower optimizer.lr"):
        train(run_config("671B", tmp_path, "steps=4", "balance.alpha=1e39"))
    assert CheckpointFolder(tmp_path / "run" / "checkpoints").latest() == 2


RAMP = ("batch={global_batch: 16, micro_batch: 2, ramp: {start: 4, tokens: 1024}, lr_rule: sqrt}", "steps=6")


def test_a_ramp_grows_the_batch_and_goes_on_where_it_was(tmp_path):
    train(run_config("671B", tmp_path / "whole", *RAMP))
    found = records(tmp_path / "whole" / "run")
    assert [r["batch"] for r in found] == [4, 4, 4, 8, 8, 12]  # 1024 tokens are 32 sequences
    assert [r["tokens"] for r in found] == [32 * n for n in (4, 8, 12, 20, 28, 40)]
    assert found[5]["lr"] == pytest.approx(found[2]["lr"] * 3**0.5)  # the schedule is still at its peak
    config = run_config("671B", tmp_path / "parts", *RAMP)
    train(config.model_copy(update={"steps": 3}))
    train(config)
    assert losses(config.run_dir) == losses(tmp_path / "whole" / "run")


def test_a_budget_in_tokens_ends_a_ramp_at_its_tokens(tmp_path):
    result = train(run_config("671B", tmp_path, *RAMP[:1], "steps=null", "tokens=1000"))
    assert result.steps == 6 and records(tmp_path / "run")[-1]["tokens"] == 40 * 32


def test_a_batch_steered_by_the_noise_scale_goes_on_where_it_was(tmp_path):
    noise = "batch={global_batch: 8, micro_batch: 2, noise_scale: {minimum: 4, maximum: 16, decay: 0.5}}"
    train(run_config("671B", tmp_path / "whole", noise, "steps=6", "schedule={kind: constant}"))
    found = records(tmp_path / "whole" / "run")
    assert {r["batch"] for r in found} <= {4.0, 8.0, 12.0, 16.0} and all("noise_scale" in r for r in found)
    config = run_config("671B", tmp_path / "parts", noise, "steps=6", "schedule={kind: constant}")
    train(config.model_copy(update={"steps": 3}))
    train(config)
    assert losses(config.run_dir) == losses(tmp_path / "whole" / "run")
    assert [r["batch"] for r in records(config.run_dir)] == [r["batch"] for r in found]
    with pytest.raises(UserError, match="needs two parts of a batch"):
        train(run_config("671B", tmp_path / "one", noise.replace("micro_batch: 2", "micro_batch: 8"), "steps=2"))


def test_fp16_learns_with_its_loss_scale(tmp_path):
    train(run_config("671B", tmp_path, "precision=fp16", "steps=6"))
    found = records(tmp_path / "run")
    assert found[-1]["loss"] < found[0]["loss"] and found[0]["loss_scale"] >= 1.0


@pytest.mark.parametrize("order", ["forwards_first", "counting_pass"])
def test_scope_window_is_the_same_run_by_either_order(tmp_path, order, unbroken_window):
    train(run_config("671B", tmp_path, "steps=3", "balance.scope=window", f"balance.window_order={order}"))
    # fp32: the same sums in the same order, but for the chunks of a product whose size the memory pattern may change
    assert losses(tmp_path / "run") == pytest.approx(unbroken_window, rel=1e-6)


@pytest.fixture(scope="module")
def unbroken_window(tmp_path_factory):
    folder = tmp_path_factory.mktemp("window")
    train(run_config("671B", folder, "steps=3", "balance.scope=window", "batch.micro_batch=16"))
    return losses(folder / "run")


def test_a_run_folder_belongs_to_one_seed_and_other_data_is_said(tmp_path, capsys):
    train(run_config("671B", tmp_path, "steps=1"))
    with pytest.raises(
        UserError, match=r"was made with seed 1234, and this run has 7; use the same value, another run_dir"
    ):
        train(run_config("671B", tmp_path, "steps=2", "seed=7"))
    capsys.readouterr()
    train(run_config("671B", tmp_path, "steps=2", "data.seq_len=16"))
    assert "data.seq_len was 32 in checkpoint" in capsys.readouterr().out.replace("\n", " ")


def test_fewer_steps_than_were_taken_are_nothing_to_do_and_said(tmp_path, capsys):
    train(run_config("671B", tmp_path, "steps=2"))
    train(run_config("671B", tmp_path, "steps=1"))
    assert "nothing to do" in capsys.readouterr().out


def test_a_model_built_from_a_config_has_weights(tmp_path):
    from moetrain.model import DeepSeek

    config = run_config("671B", tmp_path).model
    torch.manual_seed(5)
    a, b = DeepSeek(config), DeepSeek(config)
    torch.manual_seed(5)
    c = DeepSeek(config)
    for (name, x), y, z in zip(a.named_parameters(), b.parameters(), c.parameters(), strict=True):
        assert bool(x.isfinite().all()) and torch.equal(x, z) and (x.ndim == 1 or not torch.equal(x, y)), name


def test_a_guard_discards_windows_whose_gradient_is_too_large(tmp_path, capsys):
    """The first steps' gradients are below the guard or not; where they are not, nothing moves and the run says why."""
    config = run_config("671B", tmp_path, "steps=2", "optimizer.skip_above=1e-3")
    with pytest.raises(UserError, match=r"20 windows in a row .* is above optimizer\.skip_above \(0\.001\)"):
        train(config)
    config = run_config("671B", tmp_path, "steps=2", "optimizer.skip_above=1e3", f"run_dir={tmp_path / 'other'}")
    assert train(config).steps == 2
