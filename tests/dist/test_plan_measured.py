"""The predicted peak is the measured one: six like the runs of benchmarks/plan.py (docs/plan.md has all)."""

from __future__ import annotations

from pathlib import Path

import pytest

import tests.support.zero  # noqa: F401 - before ranks are forked
from moetrain.config import load_config
from moetrain.planning.layout import Layout
from moetrain.planning.memory import rank_memory
from tests.support.measured import measured

pytestmark = pytest.mark.dist
SMOKE = Path(__file__).parents[2] / "configs" / "671B" / "smoke.yaml"
ZERO = ["engine=deepspeed", "deepspeed.bucket=100000"]
SMALL = ["data.seq_len=64", "batch={global_batch: 8, micro_batch: 2}"]


@pytest.mark.parametrize(
    ("world", "keys"),
    [
        (1, ["parallel.recompute=selective"]),
        (1, ["balance.scope=window"]),
        (2, ["parallel.reduce=micro_batch"]),
        (2, ["parallel.pp=2", "parallel.schedule=gpipe"]),
        (2, [*ZERO, "deepspeed.zero_stage=2", "precision=bf16"]),
        (2, [*ZERO, "deepspeed.offload_optimizer=cpu", "deepspeed.offload_parameters=cpu"]),
    ],
)
def test_predicted_peak_is_the_measured_one(world, keys):
    config = load_config(SMOKE, [*SMALL, *keys])
    layout, runs = Layout(config, world, "cpu"), measured(config, world)
    fullest = max(run["peak"] for run in runs)  # which of DeepSpeed's ranks it is follows from what they hold
    for rank, run in enumerate(runs):
        plan = rank_memory(layout, rank // layout.data_world)
        seen = fullest if config.engine == "deepspeed" else run["peak"]
        assert plan.peak + plan.host == pytest.approx(seen, rel=0.05)
