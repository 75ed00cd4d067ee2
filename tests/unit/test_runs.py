"""A run of elements goes through a checkpoint as boxes, whatever the tensor's shape and wherever it is cut."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from moetrain.checkpoint.runs import Run, RunLoadPlanner, RunSavePlanner, boxes


@given(st.lists(st.integers(1, 5), min_size=0, max_size=4), st.data())
def test_boxes_hold_each_element_of_the_run_once_and_in_order(shape, data):
    count = math.prod(shape)
    first = data.draw(st.integers(0, count))
    last = data.draw(st.integers(first, count))
    numbers = torch.arange(count).view(shape)
    got = []
    for offsets, sizes in boxes(shape, first, last):
        view = numbers
        for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            view = view.narrow(dim, offset, size)
        assert view.is_contiguous()  # so that a box is a view of the run
        got += view.flatten().tolist()
    assert got == list(range(first, last))
    assert len(list(boxes(shape, first, last))) <= max(1, 2 * len(shape) - 1)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_is_saved_in_runs_is_read_whole_and_in_other_runs(tmp_path):
    whole = torch.randn(3, 5, 7)
    cuts = [0, 1, 36, 37, 100, 105]
    flat = whole.flatten()
    save({"w0": Run(whole.shape, 0, flat)}, checkpoint_id=tmp_path / "one", no_dist=True, planner=RunSavePlanner())
    got = torch.zeros_like(whole)
    load({"w0": got}, checkpoint_id=tmp_path / "one", no_dist=True)
    assert torch.equal(got, whole)
    for first, last in itertools.pairwise(cuts):
        room = torch.zeros(last - first)
        state = {"w0": Run(whole.shape, first, room)}
        load(state, checkpoint_id=tmp_path / "one", no_dist=True, planner=RunLoadPlanner())
        assert torch.equal(room, flat[first:last])
