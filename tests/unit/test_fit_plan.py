"""Before a run starts the plan is asked, and refuses in one sentence what does not fit, with what would."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moetrain.__main__ import main
from moetrain.config import load_config
from moetrain.errors import UserError
from moetrain.planning import fit, plan
from moetrain.planning.fit import Machine, check, guess
from moetrain.planning.hardware import cluster
from moetrain.planning.layout import Layout
from moetrain.planning.memory import rank_memory
from moetrain.planning.plan import make_plan
from moetrain.planning.states import rank_states
from tests.unit.test_fit import refusal

CONFIGS = Path(__file__).parents[2] / "configs"
GIB = 2**30
#: a model with few experts of the scale's size, which is traced in a second
FEW = ("model.n_routed_experts=8", "data.seq_len=512")
ONE = Machine(gpus=1, gpu_bytes=79 * GIB, host_bytes=1900 * GIB, local_ranks=1, ranks=1, fp8=True)


def needs(*overrides: str) -> int:
    return make_plan(load_config(CONFIGS / "16B", [*FEW, *overrides]), cluster("1xH100")).need


def test_what_the_plan_says_is_missing_ends_the_start_with_the_key_that_mends_it() -> None:
    """States alone would fit."""
    machine = replace(ONE, gpu_bytes=needs("parallel.recompute=full") + GIB)
    text = refusal("16B", machine, *FEW, "parallel.recompute=none")
    assert "does not fit: each GPU needs" in text and "for CUDA and NCCL" in text
    assert text.endswith("; add parallel.recompute=full to the command, or --force to try it anyway")
    check(load_config(CONFIGS / "16B", [*FEW, "parallel.recompute=full"]), CONFIGS / "16B", machine)


def test_where_no_key_mends_it_the_smoke_run_is_named(monkeypatch) -> None:
    monkeypatch.setattr(fit, "PATIENCE", 0.0)
    text = refusal("16B", replace(ONE, gpu_bytes=needs() - GIB), *FEW)
    assert "does not fit: each GPU needs" in text
    smoke = CONFIGS / "16B" / "smoke.yaml"
    assert text.endswith(f"what runs here is `python -m moetrain --config {smoke}`, or --force to try it anyway")


def test_force_starts_whatever_memory_is_missing_and_nothing_impossible() -> None:
    config = load_config(CONFIGS / "16B", FEW)
    check(config, None, replace(ONE, gpu_bytes=GIB, host_bytes=GIB), force=True)
    with pytest.raises(UserError, match="needs 1 CUDA GPU"):
        check(config, None, replace(ONE, gpus=0), force=True)
    with pytest.raises(UserError, match="was written for 1 process and 2 started"):
        check(config, None, replace(ONE, gpus=2, local_ranks=2, ranks=2), force=True)


def test_a_drive_that_is_too_small_is_seen() -> None:
    given = ("model.n_routed_experts=16", "model.num_hidden_layers=4", "data.seq_len=512")
    machine = Machine(4, 139 * GIB, 1900 * GIB, 4, 4, True, drive_bytes=10**10)
    text = refusal("236B", machine, *given)
    assert "GiB on the drive of deepspeed.nvme_path for what is offloaded (here: 9.3 GiB free)" in text
    check(load_config(CONFIGS / "236B", given), None, replace(machine, drive_bytes=10**12))


def test_a_layout_without_a_plan_is_not_refused() -> None:
    given = ["device=cpu", "parallel.pp=2", "parallel.schedule=zbv_zero_bubble", "parallel.reshard_after_forward=false"]
    machine = Machine(gpus=0, gpu_bytes=0, host_bytes=2 * GIB, local_ranks=2, ranks=2, fp8=False)
    check(load_config(CONFIGS / "671B" / "smoke.yaml", given), None, machine)


@pytest.mark.parametrize("scale", ["16B", "236B", "671B"])
def test_a_small_run_does_not_wait_for_a_plan(scale, monkeypatch) -> None:
    monkeypatch.setattr(plan, "make_plan", lambda *_: pytest.fail("a plan was made"))
    machine = Machine(gpus=0, gpu_bytes=0, host_bytes=8 * GIB, local_ranks=1, ranks=1, fp8=False)
    check(load_config(CONFIGS / scale / "smoke.yaml"), None, machine)


@pytest.mark.parametrize(
    "given",
    [
        ("671B/smoke.yaml", "device=cpu"),
        ("236B/smoke.yaml", "device=cpu", "balance.scope=window"),
        ("16B/smoke.yaml", "device=cpu", "precision=bf16"),
        ("16B", *FEW, "engine=native", "parallel.recompute=none"),
        ("671B", "model.n_routed_experts=16", "data.seq_len=512", "engine=native", "parallel.recompute=none"),
    ],
)
def test_what_is_guessed_without_a_plan_is_more_than_the_plan_says(given) -> None:
    name, *keys = given
    config = load_config(CONFIGS / name, keys)
    world = config.parallel.world_size or 1
    layout = Layout(config, world, "cpu" if "smoke" in name else "cuda")
    assert guess(config, world, rank_states(config, world)) > rank_memory(layout).peak


def test_force_is_a_flag_of_the_command(monkeypatch) -> None:
    seen = []

    def refuse(*_, force: bool) -> None:
        seen.append(force)
        raise UserError("refused")

    monkeypatch.setattr(fit, "check", refuse)
    smoke = str(CONFIGS / "671B" / "smoke.yaml")
    assert main(["--config", smoke, "--force"]) == main(["train", "--config", smoke]) == 2
    assert seen == [True, False]
