"""Checkpoints: whole or not there; what is damaged is recognised and passed over."""

from __future__ import annotations

import itertools
import json
import multiprocessing as mp
import re
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from moetrain.accumulate import MoEAccumulator
from moetrain.checkpoint import CheckpointFolder
from moetrain.errors import UserError
from moetrain.model import DeepSeekLoss
from moetrain.optim import build_adamw, parameter_groups
from tests.support.processes import run_plain
from tests.support.small import V3, difference, every_loss, model, state, window


def built(config=V3):
    m = model(config)
    optimizer, _ = build_adamw(parameter_groups(m, 0.1), lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
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
    rng = torch.get_rng_state()
    again, other, accumulator = built()
    extra = checkpoints.load_latest(model=again, optimizer=other, config={"model": {"a": 1}})
    assert extra is not None and extra["step"] == 3 and torch.equal(extra["rng"], rng)
    accumulator.load_state_dict(extra["routing"])
    assert difference(state(again), state(m)) == 0.0
    assert difference(moments(other), moments(optimizer)) == 0.0
    assert other.param_groups[0]["weight_decay"] == 0.1 and other.param_groups[1]["weight_decay"] == 0.0


def test_a_state_from_before_the_first_step_loads(tmp_path):
    m, optimizer, accumulator = built()
    CheckpointFolder(tmp_path).save(0, model=m, optimizer=optimizer, extra={"step": 0}, config={})
    assert not optimizer.state  # and saving took no step
    again, other, resumed = built()
    assert CheckpointFolder(tmp_path).load_latest(model=again, optimizer=other) == {"step": 0}
    unsaved, _, plain = built()
    for each in (accumulator, resumed, plain):
        each.step(window([2, 4]))
    assert difference(state(again), state(unsaved)) == difference(state(m), state(unsaved)) == 0.0


def test_a_parameter_that_never_got_a_gradient_starts_at_its_own_step_1(tmp_path):
    m, optimizer, _ = built()
    first, *others = m.parameters()
    for parameter in others:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    CheckpointFolder(tmp_path).save(1, model=m, optimizer=optimizer, extra={}, config={})
    again, other, accumulator = built()
    accumulator.step(window([2, 4]))  # every parameter has moments, which the loaded state takes away again
    CheckpointFolder(tmp_path).load_latest(model=again, optimizer=other)
    assert not other.state.get(next(again.parameters())) and not optimizer.state.get(first)
    for a, b in itertools.islice(zip(again.parameters(), m.parameters(), strict=True), 1, None):
        assert other.state[a].keys() == optimizer.state[b].keys()
        assert all(torch.equal(other.state[a][key], optimizer.state[b][key]) for key in other.state[a])


def test_the_saved_learning_rate_comes_back(tmp_path):
    m, optimizer, _ = built()
    for group in optimizer.param_groups:
        group["lr"] = 0.125
    CheckpointFolder(tmp_path).save(0, model=m, optimizer=optimizer, extra={}, config={})
    again, other, _ = built()
    CheckpointFolder(tmp_path).load_latest(model=again, optimizer=other)
    assert [group["lr"] for group in other.param_groups] == [0.125, 0.125]


def test_extra_that_could_not_be_loaded_again_is_refused_at_once(tmp_path):
    m, optimizer, checkpoints = saved(tmp_path, steps=1)
    with pytest.raises(TypeError, match="extra may hold dicts"):
        checkpoints.save(2, model=m, optimizer=optimizer, extra={"path": Path("x")}, config={})
    assert checkpoints.latest() == 1


def test_the_last_n_are_kept(tmp_path):
    _, _, checkpoints = saved(tmp_path, steps=5, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_00000004", "step_00000005"]
    assert checkpoints.latest() == 5


def test_the_checkpoint_just_written_is_never_the_one_that_goes(tmp_path):
    m, optimizer, checkpoints = saved(tmp_path, steps=5, keep=2)
    checkpoints.save(1, model=m, optimizer=optimizer, extra={"step": 1}, config={})  # a run that started afresh
    names = ["step_00000001", "step_00000004.superseded", "step_00000005.superseded"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    assert checkpoints.load_latest(model=m, optimizer=optimizer) == {"step": 1}


def test_a_step_that_is_saved_again_replaces_the_first(tmp_path):
    m, optimizer, checkpoints = saved(tmp_path, steps=1, keep=1)
    checkpoints.save(1, model=m, optimizer=optimizer, extra={"again": True}, config={})
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    assert checkpoints.load_latest(model=m, optimizer=optimizer) == {"again": True}


def test_a_kill_between_the_two_renames_of_a_replacement_costs_nothing(tmp_path):
    m, optimizer, checkpoints = saved(tmp_path, steps=1)
    (tmp_path / "step_00000001").rename(tmp_path / "step_00000001.replaced")
    extra = checkpoints.load_latest(model=m, optimizer=optimizer)
    assert extra is not None and extra["step"] == 1 and checkpoints.latest() == 1


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


def copy_over(source, target):
    shutil.rmtree(target)
    shutil.copytree(source, target)


def manifest(folder, **values):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


DAMAGE = {
    "no manifest": (lambda f: (f / "manifest.json").unlink(), "has no manifest, so it was never finished"),
    "manifest cut off": (lambda f: (f / "manifest.json").write_text('{"files"'), "damaged manifest"),
    "manifest empty": (lambda f: (f / "manifest.json").write_text("{}"), "damaged manifest"),
    "manifest of another kind": (lambda f: (f / "manifest.json").write_text("[]"), "damaged manifest"),
    "manifest without files": (lambda f: manifest(f, files={}), "damaged manifest"),
    "file without size": (lambda f: manifest(f, files={".metadata": {}}), "damaged manifest"),
    "folder of another step": (lambda f: copy_over(f.with_name("step_00000002"), f), "has the manifest of step 2"),
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


OTHERS = {
    "wider": ({"vocab_size": 80}, r"embed_tokens.weight has shape \[64, 32\] in it and \[80, 32\] in this run"),
    "deeper": ({"num_hidden_layers": 4}, r"layers.3.input_layernorm.weight is not in it"),
    "shallower": ({"num_hidden_layers": 2}, r"layers.2.[\w.]+ is in it and not in this run"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_tensor_that_differs_is_named_and_nothing_is_loaded(tmp_path, case):
    saved(tmp_path)
    update, sentence = OTHERS[case]
    m, optimizer, _ = built(V3.model_copy(update=update))
    before = state(m)
    with pytest.raises(UserError, match=rf"does not fit this model \({sentence}\)"):
        CheckpointFolder(tmp_path).load_latest(model=m, optimizer=optimizer)
    assert difference(state(m), before) == 0.0 and not optimizer.state


def test_another_precision_is_refused_and_not_rounded(tmp_path):
    saved(tmp_path)
    m = model(dtype=torch.float32)
    optimizer, _ = build_adamw(parameter_groups(m, 0.1), lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    with pytest.raises(UserError, match=r"has torch.float64 in it and torch.float32 in this run"):
        CheckpointFolder(tmp_path).load_latest(model=m, optimizer=optimizer)


def save_until_killed(folder):
    m, optimizer, _ = built()
    checkpoints = CheckpointFolder(folder, keep=1)
    for step in itertools.count():
        # each step twice: a replacement may be killed as well
        checkpoints.save(step // 2, model=m, optimizer=optimizer, extra={"step": step // 2}, config={})


@pytest.mark.parametrize("after", [0.0, 0.007, 0.02, 0.05, 0.08])
def test_a_save_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path, after):
    process = mp.get_context("fork").Process(target=save_until_killed, args=(tmp_path,), daemon=True)
    process.start()
    checkpoints, end = CheckpointFolder(tmp_path, keep=1), time.monotonic() + 60
    while checkpoints.latest() is None and process.is_alive() and time.monotonic() < end:
        time.sleep(0.002)
    time.sleep(after)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    m, optimizer, _ = built()
    warnings: list[str] = []
    extra = checkpoints.load_latest(model=m, optimizer=optimizer, warn=warnings.append)
    assert extra == {"step": checkpoints.latest()} and not warnings
    step = extra["step"] + 1
    checkpoints.save(step, model=m, optimizer=optimizer, extra={}, config={})
    assert [p.name for p in tmp_path.iterdir()] == [f"step_{step:08d}"]


def save_with_little_room(rank, world, folder, room):
    m, optimizer, checkpoints = saved(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    with pytest.raises(
        UserError, match=r"could not be written to .* \((File too large|the disk took only a part.*)\); make room"
    ):
        checkpoints.save(4, model=m, optimizer=optimizer, extra={"much": torch.zeros(1 << 21)}, config={})
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert checkpoints.latest() == 3
    checkpoints.save(4, model=m, optimizer=optimizer, extra={}, config={})
    return checkpoints.latest(), sorted(p.name for p in folder.iterdir())


@pytest.mark.parametrize(
    "room", [1 << 10, 1 << 18, 1 << 22], ids=["for no tensor", "for a part of a shard", "for the shards"]
)
def test_a_full_disk_is_one_sentence_and_costs_no_older_checkpoint(tmp_path, room):
    [result] = run_plain(save_with_little_room, 1, tmp_path, room)
    assert result == (4, ["step_00000003", "step_00000004"])


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    m, optimizer, _ = built()
    with pytest.raises(UserError, match=r"could not be written to .*file \(Not a directory\)"):
        CheckpointFolder(tmp_path / "file").save(1, model=m, optimizer=optimizer, extra={}, config={})


def test_a_damaged_checkpoint_never_pushes_out_the_last_whole_one(tmp_path):
    m, optimizer, checkpoints = saved(tmp_path, steps=3, keep=2)
    path = shard(tmp_path / "step_00000003")
    path.write_bytes(path.read_bytes()[:-9])
    checkpoints.save(4, model=m, optimizer=optimizer, extra={"step": 4}, config={})
    path = shard(tmp_path / "step_00000004")
    path.write_bytes(path.read_bytes()[:-9])
    again, other, _ = built()
    extra = CheckpointFolder(tmp_path).load_latest(model=again, optimizer=other, warn=lambda sentence: None)
    assert extra is not None and extra["step"] == 2
