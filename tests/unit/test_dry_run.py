"""The real step at any scale on fake tensors: what it counts is what the plan says, and what real runs use."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from moetrain.__main__ import main
from moetrain.config import load_config
from moetrain.errors import UserError
from moetrain.planning.dry_run import PLANNED, DryRun, dry_run
from moetrain.planning.hardware import cluster

CONFIGS = Path(__file__).parents[2] / "configs"
NATIVE = ["engine=native", "parallel.world_size=null"]
GIB = 2**30


def agrees(run: DryRun, *, memory: float = 0.05) -> None:
    for rank in run.ranks:
        assert rank.planned is None or rank.planned.peak == pytest.approx(rank.peak, rel=memory)
        for kind in PLANNED:
            counted, planned = rank.traffic[kind]
            assert counted == round(planned), kind
        # whatever an operator sent is in the step's own report; torch's stages greet their neighbours with one number
        assert 0 <= sum(rank.wire.values()) - sum(counted for counted, _ in rank.traffic.values()) <= 16


SMALL = {
    "one GPU": ("1xH100", ["precision=bf16"]),
    "bf16, experts over 4 of 8": (
        "8xH100",
        ["precision=bf16", "parallel.ep=4", "parallel.recompute=full", "model.moe_intermediate_size=512"],
    ),
    "fp8, stages of sharded ranks, 2 copies": ("8xH100", ["parallel.pp=2", "parallel.dp_replicate=2"]),
    "bf16, interleaved stages of sharded ranks": (
        "4xH100",
        ["precision=bf16", "parallel.pp=2", "parallel.schedule=interleaved_1f1b"],
    ),
    "bf16, counted before its window, stages of sharded ranks": (
        "4xH100",
        ["precision=bf16", "parallel.pp=2", "balance.scope=window"],
    ),
    "fp8, DualPipeV, experts over 2": (
        "4xH100",
        ["parallel.pp=2", "parallel.ep=2", "parallel.schedule=dualpipev", "parallel.reshard_after_forward=false"],
    ),
}


QUICK = ("bf16, experts over 4 of 8", "bf16, interleaved stages of sharded ranks", "fp8, DualPipeV, experts over 2")


@pytest.mark.parametrize(
    "layout", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SMALL]
)
def test_a_small_models_step_is_what_the_plan_says(layout: str) -> None:
    gpus, keys = SMALL[layout]
    config = load_config(CONFIGS / "671B" / "smoke.yaml", [*NATIVE, "device=cuda", "precision=fp8", *keys])
    agrees(dry_run(config, cluster(gpus)), memory=0.02)


#: world -> keys: the layouts that docs/plan.md shows
FULL = {
    8: ["parallel.ep=8"],
    256: ["parallel.pp=8", "parallel.ep=32", "parallel.recompute=full"],
    2048: ["parallel.pp=16", "parallel.ep=64", "parallel.reduce=window", "parallel.recompute=full"],
}


@pytest.mark.slow
@pytest.mark.parametrize("world", FULL)
def test_671b_runs_dry_at_full_scale_within_three_minutes_and_8_gib(world: int) -> None:
    config = load_config(CONFIGS / "671B", [*NATIVE, *FULL[world]])
    assert config.model.num_nextn_predict_layers == 1
    run = dry_run(config, cluster(f"{world}xH800"))
    agrees(run)
    assert sum(rank.seconds for rank in run.ranks) < 180
    assert max(rank.resident for rank in run.ranks) < 8 * GIB


def test_the_command_prints_counted_beside_planned(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "--config", str(CONFIGS / "671B" / "smoke.yaml"), "--gpus", "2xH100", "--dry-run", *NATIVE]
    assert main([*given, "--json", "device=cuda", "precision=bf16", "model.num_hidden_layers=2"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["gpus"] == "2xH100" and said["ranks"][0]["peak"] > 0


def test_what_cannot_run_dry_is_said_in_words() -> None:
    with pytest.raises(UserError, match="add engine=native"):
        dry_run(load_config(CONFIGS / "671B", ["parallel.world_size=null"]), cluster("8xH200"))
    with pytest.raises(UserError, match=r"add parallel\.offload_states=false"):
        dry_run(load_config(CONFIGS / "671B", [*NATIVE, "parallel.offload_states=true"]), cluster("8xH200"))
    with pytest.raises(UserError, match="must divide"):
        dry_run(load_config(CONFIGS / "671B", [*NATIVE, "parallel.pp=3"]), cluster("8xH200"))
    smoke = CONFIGS / "671B" / "smoke.yaml"
    for precision in ("fp32", "float64", "fp16"):
        with pytest.raises(UserError, match="add precision=bf16"):
            dry_run(load_config(smoke, [*NATIVE, "device=cuda", f"precision={precision}"]), cluster("2xH100"))
    with pytest.raises(UserError, match="give --gpus GPUs"):
        dry_run(load_config(smoke, NATIVE), cluster("2xCPU"))
    with pytest.raises(UserError, match="which A100 do not"):
        dry_run(load_config(smoke, [*NATIVE, "device=cuda", "precision=fp8"]), cluster("2xA100"))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["--gpus", "2xH100", "--nodes", "-2"], "--nodes: -2"),
        (["--gpus", "2xH100", "--nodes", "0"], "--nodes: 0"),
        (["--gpus", "2xH100", "gpu.memory=nan"], "gpu.memory: nan"),
        (["--gpus", "2xH100", "gpu.memory=inf"], "gpu.memory: inf"),
        (["--gpus", "2xH100", "gpu.link=0"], "gpu.link: 0"),
        (["--gpus", "2xH100", "gpu.per_node=0.5"], "gpu.per_node: 0.5"),
        (["--gpus", "2xH100", "gpu.price=-1"], "gpu.price: -1"),
        (["--fewest", "H100", "--search"], "take --gpus"),
        (["--fewest", "H100", "--nodes", "2"], "take --gpus"),
        (["--fewest", "A100", "device=cuda", "precision=fp8"], "which A100 do not"),
    ],
)
def test_a_wrong_machine_is_one_sentence(given: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--config", str(CONFIGS / "671B" / "smoke.yaml"), *given]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
