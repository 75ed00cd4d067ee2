"""Whole runs on DeepSpeed's engine: the native engine's curve, and checkpoints that go between the two."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.support.zero import FP16  # also: before ranks are forked
from moetrain import save_pretrained
from moetrain.model import DeepSeek
from tests.support.runs import ROOT, environment, losses, overrides, run_config, train_on

pytestmark = pytest.mark.dist

#: fp32: a step's sums in another order, 2^-24 each, grow through AdamW's division by small second moments
BOUND = 1e-5
SAME = ("optimizer.eps=1e-4", "model.num_hidden_layers=4", "batch.micro_batch=2", "schedule.hold=1000", "precision=fp32")
ZERO = "engine=deepspeed"
HOST = ("deepspeed.offload_optimizer=cpu", "deepspeed.offload_parameters=cpu")

#: processes and what is configured: each goes on from the checkpoint of the one before
CHAIN = (
    (1,),
    (2, ZERO, "deepspeed.zero_stage=1"),
    (2, "parallel.pp=2"),
    (2, ZERO, "deepspeed.zero_stage=3", "deepspeed.small_parameter=0"),
    (2, ZERO, "deepspeed.zero_stage=2", "parallel.ep=2", "deepspeed.offload_optimizer=cpu"),
    (1, ZERO, "deepspeed.zero_stage=3", *HOST),
    (2, "parallel.ep=2"),
    (4, ZERO, "deepspeed.zero_stage=2", "parallel.ep=2"),
)


def through(chain, folder):
    """Two steps on each, against one process of the native engine."""
    want = losses(train_on(1, "671B", folder / "whole", f"steps={2 * len(chain)}", *SAME))
    for number, (world, *how) in enumerate(chain, start=1):
        run = train_on(world, "671B", folder / "chain", f"steps={2 * number}", *SAME, *how)
    got = losses(run)
    assert len(got) == 2 * len(chain)
    assert got == pytest.approx(want, rel=BOUND)


def test_a_run_goes_to_zero_and_back(tmp_path):
    through(CHAIN[1:4], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_goes_from_engine_to_engine(tmp_path):
    through(CHAIN, tmp_path)


RESUMED = {
    "1": ("deepspeed.zero_stage=1",),
    "2 host": ("deepspeed.zero_stage=2", "deepspeed.offload_optimizer=cpu"),
    "3": ("deepspeed.zero_stage=3",),
    "3 host": ("deepspeed.zero_stage=3", *HOST),
    "3 bf16": ("deepspeed.zero_stage=3", "precision=bf16"),
}


@pytest.mark.parametrize("name", ["2 host", *(pytest.param(n, marks=pytest.mark.slow) for n in ("1", "3", "3 host", "3 bf16"))])
def test_resumed_a_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, name):
    how = (*SAME, ZERO, *RESUMED[name])
    whole = losses(train_on(2, "671B", tmp_path / "whole", "steps=4", *how))
    train_on(2, "671B", tmp_path / "parts", "steps=2", *how)
    assert losses(train_on(2, "671B", tmp_path / "parts", "steps=4", *how)) == whole


def test_a_hugging_face_folder_is_where_a_run_starts(tmp_path):
    """In every layout, of which each rank reads its own part: one process' curve."""
    folder = tmp_path / "hf"
    start = DeepSeek(run_config("671B", tmp_path, *SAME, "steps=2").model)
    start.init_weights(99)
    save_pretrained(start, folder, quantize="fp8")
    how = ("steps=2", *SAME, f"init_from={folder}")
    want = losses(train_on(1, "671B", tmp_path / "native", *how))
    assert want != pytest.approx(losses(train_on(1, "671B", tmp_path / "fresh", "steps=2", *SAME)), rel=1e-3)
    for world, *layout in ((2, ZERO), (2, "parallel.ep=2"), (2, "parallel.pp=2")):
        assert losses(train_on(world, "671B", tmp_path / layout[0], *how, *layout)) == pytest.approx(want, rel=BOUND)


@pytest.mark.parametrize("scale", ["16B", "236B", pytest.param("671B", marks=pytest.mark.slow)])
def test_every_scale_s_smoke_run_has_the_native_curve(tmp_path, scale):
    want = losses(train_on(1, scale, tmp_path / "native", "steps=3", SAME[0], "precision=fp32"))
    got = losses(train_on(2, scale, tmp_path / "zero", "steps=3", SAME[0], "precision=fp32", ZERO))
    assert got == pytest.approx(want, rel=BOUND)


@pytest.mark.parametrize(
    ("precision", "stage"),
    [("fp8", 3), *(pytest.param(p, z, marks=pytest.mark.slow) for p, z in (("fp8", 2), ("bf16", 2), ("bf16", 3), ("fp16", 3)))],
)
def test_in_half_precision_the_curve_is_that_of_the_native_engine(tmp_path, precision, stage):
    """bf16 keeps 8 bits: the two engines round different sums, 2^-9 each. FP8 quantises fp32 values here, which differ
    in the last bit only: a value at an edge between two of FP8's may fall to either side."""
    if precision == "fp16" and not FP16:
        pytest.skip("DeepSpeed takes no fp16 on this CPU")
    more = ("steps=4", "optimizer.eps=1e-4", f"precision={precision}")
    want = losses(train_on(2, "671B", tmp_path / "native", *more))
    got = losses(train_on(2, "671B", tmp_path / "zero", *more, ZERO, f"deepspeed.zero_stage={stage}"))
    assert got == pytest.approx(want, rel=4e-3)


@pytest.mark.slow
@pytest.mark.timeout(600)  # it is compiled, in minutes
def test_deepspeed_s_cpu_adam_is_torch_s_and_goes_on_from_it(tmp_path):
    how = (*SAME, ZERO, "deepspeed.zero_stage=3", "deepspeed.offload_optimizer=cpu")
    want = losses(train_on(1, "671B", tmp_path / "whole", "steps=6", *how))
    for steps, adam in ((2, "deepspeed"), (4, "torch"), (6, "deepspeed")):
        run = train_on(1, "671B", tmp_path / "turns", f"steps={steps}", *how, f"deepspeed.cpu_adam={adam}")
    assert losses(run) == pytest.approx(want, rel=BOUND)


def need_libaio() -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible(verbose=False):
        pytest.skip("libaio-dev is not installed")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_states_on_a_drive_are_those_in_memory(tmp_path, precision):
    """Made there, saved from there, loaded to there; in bf16 masters are other numbers than weights."""
    need_libaio()
    how = (*SAME, ZERO, "deepspeed.zero_stage=3", "deepspeed.small_parameter=0", f"precision={precision}")
    drive = (
        "deepspeed.offload_optimizer=nvme",
        "deepspeed.offload_parameters=nvme",
        f"deepspeed.nvme_path={tmp_path / 'nvme'}",
    )
    want = losses(train_on(2, "671B", tmp_path / "memory", "steps=6", *how))
    folder = tmp_path / "drive"
    train_on(2, "671B", folder, "steps=2", *how, *drive)
    train_on(2, "671B", folder, "steps=4", *how, *drive)
    assert losses(train_on(2, "671B", folder, "steps=6", *how)) == pytest.approx(want, rel=BOUND)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_lies_on_a_drive_is_not_in_memory(tmp_path):
    """The peak of the whole process, with Python and torch in it, is below what weights, masters, moments take."""
    need_libaio()
    layers, width, experts = 12, 384, 16
    config = [
        *overrides("671B", tmp_path), "steps=2", "device=cpu", ZERO, "precision=fp32",
        f"model.num_hidden_layers={layers}", f"model.hidden_size={width}", f"model.intermediate_size={4 * width}",
        f"model.moe_intermediate_size={width}", f"model.n_routed_experts={experts}", "model.num_nextn_predict_layers=0",
        "batch.global_batch=2", "batch.micro_batch=1", "deepspeed.offload_optimizer=nvme",
        "deepspeed.offload_parameters=nvme", f"deepspeed.nvme_path={tmp_path / 'nvme'}", "deepspeed.bucket=2000000",
        "deepspeed.sub_group=5000000",
    ]  # fmt: skip
    command = [sys.executable, "-m", "moetrain", "--config", str(ROOT / "configs/671B/smoke.yaml"), *config]
    with (tmp_path / "said").open("w") as said:
        run = subprocess.Popen(command, env=environment(), stdout=said, stderr=said)
        _, status, used = os.wait4(run.pid, 0)
    text = (tmp_path / "said").read_text()
    assert status == 0, text
    found = re.search(r"([0-9.]+) M parameters", text)
    assert found is not None
    states = 16e6 * float(found[1])
    print(f"states {states / 2**20:.0f} MiB, peak {used.ru_maxrss / 1024:.0f} MiB")
    assert 1024 * used.ru_maxrss < states
