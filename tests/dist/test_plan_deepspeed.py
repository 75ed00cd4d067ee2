"""What the plan says of DeepSpeed's states is what lies in memory between two steps."""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tests.support.zero  # noqa: F401  imported before ranks are forked
from moetrain.accumulate import MoEAccumulator, Window
from moetrain.config import load_config
from moetrain.config.run import RunConfig
from moetrain.engine.deepspeed import DeepSpeedEngine
from moetrain.model import DeepSeekLoss
from moetrain.parallel.ranks import Ranks, meshes
from moetrain.planning.states import rank_states
from tests.support.processes import run_plain

pytestmark = pytest.mark.dist
SMOKE = Path(__file__).parents[2] / "configs" / "671B" / "smoke.yaml"
SMALL = [
    "data.seq_len=64", "batch={global_batch: 4, micro_batch: 1}", "precision=bf16", "engine=deepspeed", "mtp.weight=0",
    "model.num_nextn_predict_layers=0",
    "deepspeed={bucket: 100000, sub_group: 1000000, small_parameter: 0, cpu_adam: torch}",
]  # fmt: skip


@pytest.mark.parametrize(
    ("world", "keys"),
    [
        (1, ["deepspeed.zero_stage=3"]),
        (2, ["deepspeed.zero_stage=3", "deepspeed.offload_optimizer=cpu", "deepspeed.offload_parameters=cpu"]),
        (1, ["deepspeed.zero_stage=2", "deepspeed.offload_optimizer=cpu"]),
    ],
)
def test_states_are_what_the_plan_says(world, keys):
    config = load_config(SMOKE, [*SMALL, *keys])
    states = rank_states(config, world)
    with tempfile.TemporaryDirectory() as folder:
        for seen in run_plain(_on_rank, world, config, folder, timeout=240):
            assert states.device + states.host == pytest.approx(seen, rel=0.03)


def _on_rank(rank: int, world: int, config: RunConfig, folder: str) -> Any:
    """Bytes of all tensors that are alive after a step."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    ranks = Ranks(rank, world, torch.device("cpu"), *meshes("cpu", world, need_group=True))
    gc.collect()
    before = {each.data_ptr() for each in _storages()}
    engine = DeepSpeedEngine(config, ranks)
    accumulator = MoEAccumulator(
        engine.model, engine.optimizer, loss=DeepSeekLoss(config.model), max_norm=1.0, groups=ranks.groups,
        window_order="counting_pass", device=ranks.device, owner=engine.owner,
    )  # fmt: skip
    rows = torch.randint(0, config.model.vocab_size, (4 // world, config.data.seq_len))
    accumulator.step(Window({"input_ids": ids, "labels": ids.clone()} for ids in rows.split(1)))
    gc.collect()
    size = sum(each.nbytes() for each in _storages() if each.data_ptr() not in before)
    dist.destroy_process_group()
    return size


def _storages() -> list[torch.UntypedStorage]:
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    return list({s.data_ptr(): s for t in tensors if (s := t.untyped_storage()).nbytes()}.values())
