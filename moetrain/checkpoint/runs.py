"""A run of a tensor's elements as a checkpoint's tensor, for engines that cut parameters without regard to their shape.

ZeRO lays parameters end to end and gives each rank as many elements as the next: what a rank holds of a parameter is a
run of its elements in row-major order. torch's distributed checkpoint (DCP) writes boxes. A run is a few boxes (the end
of a row, whole rows, the beginning of a row; within a row the same again), each a view, so that what is written can be
read on any other layout, and the other way round, without ever putting a parameter together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


def boxes(shape: Sequence[int], first: int, last: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(offsets, sizes) of the boxes that hold elements ``first`` to ``last`` (without it) of a tensor, in order."""
    if first >= last:
        return
    if len(shape) <= 1:
        yield ((first,), (last - first,)) if shape else ((), ())
        return
    width = math.prod(shape[1:])
    (row, column), (end, rest) = divmod(first, width), divmod(last, width)
    if column:
        stop = min(last, (row + 1) * width)
        for offsets, sizes in boxes(shape[1:], column, stop - row * width):
            yield (row, *offsets), (1, *sizes)
        first, row = stop, row + 1
    if row < end:
        yield (row, *(0 for _ in shape[1:])), (end - row, *shape[1:])
    if rest and first < last:
        for offsets, sizes in boxes(shape[1:], 0, rest):
            yield (end, *offsets), (1, *sizes)


class Run:
    """Elements ``first`` to ``first + data.numel()`` of a tensor of ``shape``; DCP's ``_Checkpointable``.

    Args:
        data: them, one dimension; read from and written into in place. Or, with ``dtype`` and ``count``, a function
            that brings them when they are written (from a drive).
    """

    def __init__(
        self,
        shape: Sequence[int],
        first: int,
        data: Tensor | Callable[[], Tensor],
        *,
        dtype: torch.dtype | None = None,
        count: int | None = None,
    ) -> None:
        self.shape, self.first, self._data = torch.Size(shape), first, data
        known = data if isinstance(data, Tensor) else None
        self.dtype = known.dtype if known is not None else dtype
        self.count = known.numel() if known is not None else count
        assert self.dtype is not None and self.count is not None
        self._chunks = {
            torch.Size(offsets): torch.Size(sizes) for offsets, sizes in boxes(shape, first, first + self.count)
        }

    @property
    def is_brought(self) -> bool:
        """From where it is not in memory."""
        return not isinstance(self._data, Tensor)

    def to_host(self) -> Run:
        """The same in host memory, and nobody else's."""
        data = self._data if isinstance(self._data, Tensor) else self._data()
        return Run(self.shape, self.first, data.detach().to("cpu", copy=True))

    def __create_write_items__(self, name: str, _: Any) -> list[WriteItem]:
        assert self.dtype is not None
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes), properties=properties, size=self.shape
                ),
            )
            for offsets, sizes in self._chunks.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets=offsets, sizes=sizes) for offsets, sizes in self._chunks.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        sizes = self._chunks[index.offset]
        data = self._data if isinstance(self._data, Tensor) else self._data()
        start = -self.first
        for offset, width in zip(index.offset, _widths(self.shape), strict=True):
            start += offset * width
        return data.detach().narrow(0, start, math.prod(sizes)).view(sizes)


class RunSavePlanner(DefaultSavePlanner):
    """DCP's, which looks for boxes in tensors alone."""

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        return value.__get_tensor_shard__(index) if isinstance(value, Run) else super().lookup_object(index)


class RunLoadPlanner(DefaultLoadPlanner):
    """DCP's, which looks for boxes in tensors alone, and forgets what is none."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        runs = {name: value for name, value in state_dict.items() if isinstance(value, Run)}
        super().set_up_planner(state_dict, metadata, is_coordinator)
        self.original_state_dict.update(runs)
        self.state_dict.update(runs)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        value = self.state_dict[index.fqn]
        return value.__get_tensor_shard__(index) if isinstance(value, Run) else super().lookup_tensor(index)


def _widths(shape: torch.Size) -> list[int]:
    """How many elements lie between neighbours, by dimension."""
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]
