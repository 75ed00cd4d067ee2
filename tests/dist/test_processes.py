"""The test helper itself: results by rank, the first traceback, and nothing left running."""

from __future__ import annotations

import multiprocessing as mp
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.processes import run_ranks

pytestmark = pytest.mark.dist


def total(rank, world, start):
    value = torch.tensor([start + rank])
    dist.all_reduce(value)
    return rank, int(value)


def one_fails(rank, world):
    if rank == 1:
        raise ValueError("this rank cannot go on")
    dist.barrier()


def sleep(rank, world):
    time.sleep(60)


def test_every_rank_answers_in_order():
    assert run_ranks(total, 3, 10) == [(0, 33), (1, 33), (2, 33)]


def test_the_rank_that_failed_first_is_named_with_its_traceback():
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 failed:.*one_fails.*ValueError: this rank cannot go on"):
        run_ranks(one_fails, 2)
    assert not mp.active_children()


def test_ranks_that_hang_are_ended():
    with pytest.raises(TimeoutError, match="2 of 2 ranks still run after 1 s"):
        run_ranks(sleep, 2, timeout=1)
    assert not mp.active_children()
