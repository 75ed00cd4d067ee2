"""The predicted peak is the measured one: four of the runs of benchmarks/plan.py (docs/plan.md has all)."""

from __future__ import annotations

from pathlib import Path

import pytest

from moetrain.config import load_config
from moetrain.planning.layout import Layout
from moetrain.planning.memory import rank_memory
from tests.support.measured import measured

pytestmark = pytest.mark.dist
SMOKE = Path(__file__).parents[2] / "configs" / "671B" / "smoke.yaml"
SMALL = ["data.seq_len=64", "batch={global_batch: 8, micro_batch: 2}"]


@pytest.mark.parametrize(
    ("world", "keys"),
    [
        (1, ["parallel.recompute=selective"]),
        (1, ["balance.scope=window"]),
        (2, ["parallel.reduce=micro_batch"]),
        (2, ["parallel.pp=2", "parallel.schedule=gpipe"]),
    ],
)
def test_predicted_peak_is_the_measured_one(world, keys):
    config = load_config(SMOKE, [*SMALL, *keys])
    for rank, run in enumerate(measured(config, world)):
        layout = Layout(config, world, "cpu")
        assert rank_memory(layout, rank // layout.data_world).peak == pytest.approx(run["peak"], rel=0.05)
