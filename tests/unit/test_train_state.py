"""Checkpoints: whole or not there; what is damaged is recognised and passed over."""

from __future__ import annotations

import errno
import json
import re

import pytest
import torch

from moetrain.accumulate import MoEAccumulator
from moetrain.checkpoint import CheckpointFolder, train_state
from moetrain.errors import UserError
from moetrain.model import DeepSeekLoss
from moetrain.optim import build_adamw
from tests.support.small import V3, difference, every_loss, model, state, window


def built(config=V3):
    m = model(config)
    optimizer, _ = build_adamw(m, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    accumulator = MoEAccumulator(m, optimizer, loss=DeepSeekLoss(config), balance=every_loss(config, "previous"))
    return m, optimizer, accumulator


def saved(folder, steps=3, keep=2):
    m, optimizer, accumulator = built()
    checkpoints = CheckpointFolder(folder, keep=keep)
    for step in range(1, steps + 1):
        accumulator.step(window([2, 4]))
        extra = {"step": step, "routing": accumulator.state_dict(), "rng": torch.get_rng_state()}
        checkpoints.save(step, model=m, optimizer=optimizer, extra=extra, config={"model": {"a": 1}})
    return m, optimizer, checkpoints


def moments(optimizer):
    flat = {}
    for i, entry in enumerate(optimizer.state.values()):
        flat |= {f"{i}.{k}": v for k, v in entry.items()}
    return flat


def test_everything_comes_back_bit_for_bit(tmp_path):
    m, optimizer, checkpoints = saved(tmp_path)
    again, other, accumulator = built()
    extra = checkpoints.load_latest(model=again, optimizer=other, config={"model": {"a": 1}})
    assert extra is not None and extra["step"] == 3 and torch.equal(extra["rng"], torch.get_rng_state())
    accumulator.load_state_dict(extra["routing"])
    assert difference(state(again), state(m)) == 0.0
    assert difference(moments(other), moments(optimizer)) == 0.0
    assert other.param_groups[0]["weight_decay"] == 0.1 and other.param_groups[1]["weight_decay"] == 0.0


def test_a_state_from_before_the_first_step_loads(tmp_path):
    m, optimizer, _ = built()
    CheckpointFolder(tmp_path).save(0, model=m, optimizer=optimizer, extra={"step": 0}, config={})
    again, other, _ = built()
    assert CheckpointFolder(tmp_path).load_latest(model=again, optimizer=other) == {"step": 0}


def test_the_last_n_are_kept(tmp_path):
    _, _, checkpoints = saved(tmp_path, steps=5, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000004", "step_00000005"]
    assert checkpoints.latest() == 5


def test_there_is_nothing_to_load_at_first(tmp_path):
    m, optimizer, _ = built()
    assert CheckpointFolder(tmp_path / "none").load_latest(model=m, optimizer=optimizer) is None
    assert CheckpointFolder(tmp_path / "none").latest() is None


def shard(folder):
    return next(folder.glob("*.distcp"))


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def manifest(folder, **values):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


DAMAGE = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "has no manifest, so it was never finished"),
    "manifest cut off": (lambda f: (f / "manifest.json").write_text('{"files"'), "damaged manifest"),
    "manifest empty": (lambda f: (f / "manifest.json").write_text("{}"), "damaged manifest"),
    "another format": (lambda f: manifest(f, format=99), "has format 99"),
    "shard missing": (lambda f: shard(f).unlink(), "lacks __0_0.distcp"),
    "shard cut off": (lambda f: shard(f).write_bytes(shard(f).read_bytes()[:-1]), "with .* bytes instead of"),
    "one bit flipped": (lambda f: flip(shard(f)), "wrong checksum"),
    "metadata missing": (lambda f: (f / ".metadata").unlink(), "lacks .metadata"),
    "extra cut off": (lambda f: (f / "extra.pt").write_bytes(b""), "extra.pt with 0 bytes"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_a_word(tmp_path, case):
    saved(tmp_path)
    break_it, sentence = DAMAGE[case]
    break_it(tmp_path / "step_00000003")
    m, optimizer, _ = built()
    warnings: list[str] = []
    extra = CheckpointFolder(tmp_path).load_latest(model=m, optimizer=optimizer, warn=warnings.append)
    assert extra is not None and extra["step"] == 2
    assert len(warnings) == 1 and "going on from step 2" in warnings[0]
    assert re.search(sentence, warnings[0])


def test_when_all_are_damaged_the_run_does_not_start_over_in_silence(tmp_path):
    saved(tmp_path)
    for folder in tmp_path.iterdir():
        flip(shard(folder))
    m, optimizer, _ = built()
    with pytest.raises(UserError, match=r"no checkpoint in .* is whole .* checkpoint.resume=never"):
        CheckpointFolder(tmp_path).load_latest(model=m, optimizer=optimizer)


def test_another_models_checkpoint_is_refused_by_name(tmp_path):
    saved(tmp_path)
    m, optimizer, _ = built()
    with pytest.raises(UserError, match=r"made with model.a 1, and this run has 2"):
        CheckpointFolder(tmp_path).load_latest(model=m, optimizer=optimizer, config={"model": {"a": 2}})
    wide = V3.model_copy(update={"vocab_size": 80})
    m, optimizer, _ = built(wide)
    with pytest.raises(UserError, match="does not fit this model"):
        CheckpointFolder(tmp_path).load_latest(model=m, optimizer=optimizer)


def test_a_killed_save_leaves_the_one_before_and_is_cleaned_up(tmp_path, monkeypatch):
    m, optimizer, checkpoints = saved(tmp_path)

    def killed(*args, **kwargs):
        raise KeyboardInterrupt

    for name in ("dcp_save", "_write_manifest"):
        with monkeypatch.context() as patch:
            patch.setattr(train_state, name, killed)
            with pytest.raises(KeyboardInterrupt):
                checkpoints.save(4, model=m, optimizer=optimizer, extra={}, config={})
        assert checkpoints.latest() == 3 and (tmp_path / "step_00000004.partial").exists()
    checkpoints.save(4, model=m, optimizer=optimizer, extra={}, config={})
    assert checkpoints.latest() == 4 and not list(tmp_path.glob("*.partial"))


def test_a_full_disk_is_one_sentence_and_costs_no_older_checkpoint(tmp_path, monkeypatch):
    m, optimizer, checkpoints = saved(tmp_path)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match=r"could not be written to .*No space left on device"):
        checkpoints.save(4, model=m, optimizer=optimizer, extra={}, config={})
    assert checkpoints.latest() == 3
