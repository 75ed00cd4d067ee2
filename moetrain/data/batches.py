"""The global batch as a function of the seed and a sequence number alone, whatever the layout.

Sequences come as one endless stream: each epoch in a permutation of its own. A window asks for a stretch of that stream
and takes this rank's share of it, so a run goes on in the same order on any number of ranks.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from moetrain.data.packing import TokenDataset

T = TypeVar("T")


class GlobalBatches:
    """Windows of a dataset.

    Args:
        dataset: its sequences.
        seed: of the permutations; epoch e is shuffled by (seed, e). One epoch's permutation is kept, 8 bytes a
        sequence.
    """

    def __init__(self, dataset: TokenDataset, *, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def sequence_numbers(self, first: int, count: int) -> list[int]:
        """Which sequences of the dataset are numbers first .. first + count - 1 of the stream."""
        out = []
        for number in range(first, first + count):
            epoch, place = divmod(number, len(self.dataset))
            if epoch != self._epoch:
                self._order = np.random.default_rng([self.seed, epoch]).permutation(len(self.dataset))
                self._epoch = epoch
            out.append(int(self._order[place]))
        return out

    def window(self, first: int, count: int, *, rank: int, world: int, micro_batch: int) -> list[dict[str, Tensor]]:
        """Rank ``rank``'s micro-batches of sequences first .. first + count - 1.

        Ranks get contiguous shares, the first ones one sequence more where they do not divide. Every rank gets
        ``ceil(ceil(count / world) / micro_batch)`` micro-batches; rows that are missing are padding, and a micro-batch
        has an ``attention_mask`` only if it holds any.
        """
        numbers = self.sequence_numbers(first, count)
        share, more = divmod(count, world)
        start = rank * share + min(rank, more)
        mine = numbers[start : start + share + (rank < more)]
        most = share + (more > 0)
        slots = math.ceil(most / micro_batch)
        return [self._micro_batch(mine[k * micro_batch : (k + 1) * micro_batch], micro_batch) for k in range(slots)]

    def _micro_batch(self, numbers: list[int], rows: int) -> dict[str, Tensor]:
        items = [self.dataset[number] for number in numbers]
        # a short micro-batch stays short unless it is empty: a rank without a sequence still has to take part
        if not items:
            items = [self.dataset.padding()]
        keys = {key for item in items for key in item}
        if "attention_mask" in keys:
            ones = torch.ones(self.dataset.seq_len, dtype=torch.int64)
            items = [{"attention_mask": ones, **item} for item in items]
        return {key: torch.stack([item[key] for item in items]) for key in sorted(keys)}


class Prefetcher(Generic[T]):
    """Iterates over ``make(0), make(1), ...``, the next one prepared in a thread while the last one is used.

    A context manager: leaving it ends the thread. An error in ``make`` is raised where its item would have come.
    """

    def __init__(self, make: Callable[[int], T], *, ahead: int = 1) -> None:
        self._make = make
        self._queue: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=ahead)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)

    def __enter__(self) -> Prefetcher[T]:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def __iter__(self) -> Iterator[T]:
        while True:
            item, error = self._queue.get()
            if error is not None:
                raise error
            yield item  # type: ignore[misc]

    def _work(self) -> None:
        number = 0
        while not self._stop.is_set():
            try:
                item: tuple[T | None, BaseException | None] = (self._make(number), None)
            except BaseException as error:
                item = (None, error)
            while not self._stop.is_set():
                try:
                    self._queue.put(item, timeout=0.05)
                    break
                except queue.Full:
                    continue
            if item[1] is not None:
                return
            number += 1
