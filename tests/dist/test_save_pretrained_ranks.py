"""Writing a Hugging Face folder from a sharded model: every rank learns how it went."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from moetrain import from_pretrained, save_pretrained
from moetrain.errors import UserError
from tests.support.processes import run_ranks
from tests.support.small import V3, difference, model, state

pytestmark = pytest.mark.dist


def sharded(world):
    m = model(V3)
    fully_shard(m, mesh=init_device_mesh("cpu", (world,)))
    return m


def save_on(rank, world, folder):
    """Returns how often a tensor was gathered, the error, and what was saved."""
    m = sharded(world)
    gathered = []
    real = DTensor.full_tensor
    DTensor.full_tensor = lambda self, *a, **k: gathered.append(1) or real(self, *a, **k)
    try:
        save_pretrained(m, folder)
    except UserError as error:
        return len(gathered), str(error), None
    return len(gathered), None, state(m)


def test_each_tensor_is_gathered_once_and_all_return_when_it_is_written(tmp_path):
    results = run_ranks(save_on, 2, tmp_path)
    tensors = len(list(model(V3).parameters()))
    for gathered, error, _ in results:
        assert error is None
        assert gathered == tensors + 2  # embedding and head once more, for MTP's duplicates
    again = from_pretrained(tmp_path, dtype=torch.float64)
    assert difference(state(again), results[0][2]) == 0.0


def test_a_failure_of_the_writing_rank_is_everyones_at_once(tmp_path):
    (tmp_path / "taken").write_text("")
    for gathered, error, _ in run_ranks(save_on, 2, tmp_path / "taken", timeout=30):
        assert gathered == 0
        assert error is not None and "taken cannot be written" in error
