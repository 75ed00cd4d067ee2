"""Whole runs: the loss curve of 2 and 8 ranks is that of one process, for every scale's smoke config."""

from __future__ import annotations

import shutil

import pytest
import torch

from tests.support.runs import SCALES, losses, records, train_on

pytestmark = pytest.mark.dist

# fp32: a step's sums in another order, 2^-24 each, grow through AdamW's division by small second moments; seen: 2e-6
BOUND = {"float64": 1e-12, "fp32": 1e-5}
QUICK = (("671B", "float64"), ("16B", "fp32"))


@pytest.mark.parametrize(
    ("scale", "precision"),
    [
        pytest.param(scale, precision, marks=[] if (scale, precision) in QUICK else pytest.mark.slow)
        for scale in SCALES
        for precision in BOUND
    ],
)
def test_two_and_eight_ranks_have_the_curve_of_one(tmp_path, scale, precision):
    # AdamW's eps lets float64 be compared at all: without it the first step is the sign of each gradient
    more = ("steps=4", f"precision={precision}", "optimizer.eps=1e-4")
    want = losses(train_on(1, scale, tmp_path / "1", *more, "batch.micro_batch=16"))
    assert len(want) == 4
    for world in (2, 8):
        got = losses(train_on(world, scale, tmp_path / str(world), *more, "batch.micro_batch=1"))
        assert len(got) == 4
        assert max(abs(a - b) / b for a, b in zip(got, want, strict=True)) < BOUND[precision], (world, got, want)


@pytest.mark.slow
def test_a_run_of_two_ranks_goes_on_with_one_and_four(tmp_path):
    more = ("precision=float64", "optimizer.eps=1e-4", "checkpoint.every=2", "eval.every=3")
    want = losses(train_on(2, "671B", tmp_path / "whole", "steps=6", *more))
    for world in (1, 4):
        folder = tmp_path / str(world)
        train_on(2, "671B", folder, "steps=3", *more)
        got = losses(train_on(world, "671B", folder, "steps=6", *more))
        assert len(got) == 6 and max(abs(a - b) / b for a, b in zip(got, want, strict=True)) < 1e-12


def test_a_ramp_and_a_steered_batch_are_the_same_on_two_ranks(tmp_path):
    more = ("steps=4", "precision=float64", "optimizer.eps=1e-4")
    ramp = "batch={global_batch: 12, micro_batch: 2, ramp: {start: 3, tokens: 600}}"
    want, got = (losses(train_on(world, "671B", tmp_path / f"ramp{world}", *more, ramp)) for world in (1, 2))
    assert len(got) == 4 and got == pytest.approx(want, rel=1e-12)
    steered = "batch={global_batch: 8, micro_batch: 2, noise_scale: {minimum: 4, maximum: 16, decay: 0.5}}"
    run = train_on(2, "671B", tmp_path / "noise", *more, steered, "schedule={kind: constant}")
    assert all("noise_scale" in r for r in records(run))


#: processes, and how the model is spread over them
LAYOUTS = {
    "one process": (1,),
    "sharded over two": (2,),
    "two copies, experts over two": (4, "parallel.dp_replicate=2", "parallel.ep=2"),
    "two stages": (2, "parallel.pp=2"),
    "stages in a V": (2, "parallel.pp=2", "parallel.schedule=dualpipev", "parallel.reshard_after_forward=false"),
    "two stages, experts over two": (4, "parallel.pp=2", "parallel.ep=2", "parallel.recompute=full"),
}
EXACT = ("precision=float64", "optimizer.eps=1e-4", "model.num_hidden_layers=4", "batch.micro_batch=2")


def test_one_run_goes_through_all_layouts(tmp_path):
    """Two steps on each, every one from the checkpoint of the one before: the curve of one process."""
    want = losses(train_on(1, "671B", tmp_path / "whole", "steps=12", *EXACT))
    for number, (world, *layout) in enumerate(LAYOUTS.values(), start=1):
        steps = (f"steps={2 * number}", "schedule.hold=1000")
        run = train_on(world, "671B", tmp_path / "spread", *steps, *EXACT, *layout)
    assert losses(run) == pytest.approx(want, rel=1e-12)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", LAYOUTS)
def test_saved_by_any_layout_a_run_goes_on_with_every_other(tmp_path, first):
    want = losses(train_on(1, "671B", tmp_path / "whole", "steps=4", *EXACT))
    world, *layout = LAYOUTS[first]
    train_on(world, "671B", tmp_path / "first", "steps=2", *EXACT, *layout)
    for number, (other, *then) in enumerate(LAYOUTS.values()):
        folder = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "first", folder)
        got = losses(train_on(other, "671B", folder, "steps=4", *EXACT, *then))
        assert got == pytest.approx(want, rel=1e-12), (first, number)


@pytest.mark.slow
def test_every_layout_in_fp32_has_the_curve_of_one_process(tmp_path):
    more = ("steps=4", "optimizer.eps=1e-4", "model.num_hidden_layers=4", "batch.micro_batch=2")
    want = losses(train_on(1, "671B", tmp_path / "0", *more))
    for number, (world, *layout) in enumerate(LAYOUTS.values(), start=1):
        got = losses(train_on(world, "671B", tmp_path / f"{number}", *more, *layout))
        assert got == pytest.approx(want, rel=BOUND["fp32"]), number


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.slow), "interleaved_zero_bubble"])
def test_stages_in_bf16_have_the_curve_of_one_process_in_bf16(tmp_path, schedule):
    """fp32 sums of gradients in both; 1e-4: hidden states round alike, gradients of weights in another order."""
    more = ("steps=4", "precision=bf16", "optimizer.eps=1e-4", "model.num_hidden_layers=4", "batch.micro_batch=4")
    want = losses(train_on(1, "671B", tmp_path / "1", *more))
    plan = ("parallel.pp=2", f"parallel.schedule={schedule}", "parallel.reshard_after_forward=false")
    got = losses(train_on(2, "671B", tmp_path / "2", *more, *plan))
    assert got == pytest.approx(want, rel=1e-4)


@pytest.mark.parametrize(
    ("world", "precision"),
    [(2, "bf16"), *(pytest.param(w, p, marks=pytest.mark.slow) for w, p in ((1, "float64"), (1, "bf16"), (2, "float64")))],
)
def test_states_in_host_memory_change_nothing(tmp_path, world, precision):
    more = ("steps=3", f"precision={precision}", "optimizer.eps=1e-4", "checkpoint.every=2")
    want = losses(train_on(world, "671B", tmp_path / "device", *more))
    got = losses(train_on(world, "671B", tmp_path / "host", *more, "parallel.offload_states=true"))
    assert len(got) == 3 and got == pytest.approx(want, rel=1e-12)


def test_bf16_moments_go_through_checkpoints_and_layouts(tmp_path):
    """On one process a resumed run is the same to the last bit; elsewhere moments near a tie round otherwise: 1e-3."""
    more = ("optimizer.moments=bf16", "optimizer.eps=1e-4")
    want = losses(train_on(1, "671B", tmp_path / "whole", "steps=4", *more))
    for world in (1, 2):
        train_on(1, "671B", tmp_path / f"{world}", "steps=2", *more)
        got = losses(train_on(world, "671B", tmp_path / f"{world}", "steps=4", *more))
        assert got == (want if world == 1 else pytest.approx(want, rel=1e-3))


@pytest.mark.slow
def test_fp8_runs_in_every_layout(tmp_path):
    """The first loss is the same forward, to fp32 sums. Then Wgrad's columns of 128 tokens follow the cut: 1e-3 seen."""
    more = ("steps=3", "precision=fp8", "optimizer.eps=1e-4", "model.num_hidden_layers=4", "batch.micro_batch=2")
    want = losses(train_on(1, "671B", tmp_path / "0", *more))
    for number, (world, *layout) in enumerate(LAYOUTS.values(), start=1):
        got = losses(train_on(world, "671B", tmp_path / f"{number}", *more, *layout))
        assert got[0] == pytest.approx(want[0], rel=1e-6) and got == pytest.approx(want, rel=5e-3), number


def test_a_run_says_what_its_balance_scope_costs(tmp_path, capfd):
    window = ("steps=1", "balance.scope=window", "balance.alpha=0.1", "parallel.pp=2")
    train_on(2, "671B", tmp_path / "1f1b", *window)
    assert "counting pass: one forward of the window more" in capfd.readouterr().out
    train_on(2, "671B", tmp_path / "gpipe", *window, "parallel.schedule=gpipe")
    assert "counting pass" not in capfd.readouterr().out


def test_a_resumed_run_takes_the_optimizers_settings_from_its_config(tmp_path, monkeypatch):
    """Not from the checkpoint: the learning rate follows the config, and a user believes that the rest does."""
    used = tmp_path / "used"  # in the process of the run
    inner = torch.optim.AdamW.step

    def step(self, *args, **kwargs):
        used.write_text(repr([(*g["betas"], g["eps"], g["weight_decay"], g["lr"]) for g in self.param_groups]))
        return inner(self, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    run = (1, "671B", tmp_path / "run", "schedule={kind: constant}", "checkpoint.every=2")
    train_on(*run, "steps=2")
    more = ("optimizer.betas=[0.8,0.9]", "optimizer.eps=1e-4", "optimizer.weight_decay=0.5", "optimizer.lr=5e-3")
    train_on(*run, "steps=3", *more)
    assert used.read_text() == repr([(0.8, 0.9, 1e-4, 0.5, 5e-3), (0.8, 0.9, 1e-4, 0.0, 5e-3)])
