"""The global batch as a function of the seed and a sequence number alone, whatever the layout.

Sequences come as one endless stream: each epoch in a permutation of its own. A window asks for a stretch of that stream
and takes this rank's share of it, so a run goes on in the same order on any number of ranks.

The permutation of an epoch is made once, when the stream enters it, and kept: 8 bytes a sequence (a trillion tokens in
sequences of 4096: 2 GB a rank). A cipher over the numbers would need no memory, but shuffles less well in small sets.
"""

from __future__ import annotations

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
        seed: of the permutations; epoch e is shuffled by (seed, e).
    """

    def __init__(self, dataset: TokenDataset, *, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)

    def sequence_numbers(self, first: int, count: int) -> list[int]:
        """Which sequences of the dataset are numbers first .. first + count - 1 of the stream."""
        out: list[int] = []
        while len(out) < count:
            epoch, place = divmod(first + len(out), len(self.dataset))
            if epoch != self._epoch:
                self._order = np.random.default_rng([self.seed, epoch]).permutation(len(self.dataset))
                self._epoch = epoch
            out += self._order[place : place + count - len(out)].tolist()
        return out

    def window(self, first: int, count: int, *, rank: int, world: int, micro_batch: int) -> list[dict[str, Tensor]]:
        """Rank ``rank``'s micro-batches of sequences first .. first + count - 1.

        Ranks get contiguous shares, the first ones one sequence more where they do not divide. Every rank gets
        ``K = ceil(ceil(count / world) / micro_batch)`` micro-batches of at most ``micro_batch`` sequences. A rank
        without a sequence for a slot gets one sequence of padding there (labels -100, attention_mask 0), because it
        still has to take part; rows that are only missing are left out, as they would cost time and change nothing.

        Returns:
            K dicts of int64 [B, T]: ``input_ids``, ``labels``; ``document_ids`` if the dataset has them;
            ``attention_mask`` if the micro-batch holds any padding.
        """
        numbers = self.sequence_numbers(first, count)
        share, more = divmod(count, world)
        start = rank * share + min(rank, more)
        mine = numbers[start : start + share + (rank < more)]
        slots = -(-(share + (more > 0)) // micro_batch)
        return [self._micro_batch(mine[k * micro_batch : (k + 1) * micro_batch]) for k in range(slots)]

    def _micro_batch(self, numbers: list[int]) -> dict[str, Tensor]:
        items = [self.dataset[number] for number in numbers] or [self.dataset.padding()]
        if any("attention_mask" in item for item in items):
            ones = torch.ones(self.dataset.seq_len, dtype=torch.int64)
            items = [{"attention_mask": ones, **item} for item in items]
        return {key: torch.stack([item[key] for item in items]) for key in sorted(items[0])}


class Prefetcher(Generic[T]):
    """Iterates over ``make(0), make(1), ...``, the next one prepared in a thread while the last one is used.

    A context manager: leaving it ends the thread. An error in ``make`` is raised where its item would have come, and
    again wherever one is asked for afterwards.

    Args:
        make: called in the thread, one number at a time.
        ahead: how many items may wait.
    """

    def __init__(self, make: Callable[[int], T], *, ahead: int = 1) -> None:
        self._make = make
        self._queue: queue.Queue[tuple[T]] = queue.Queue(maxsize=ahead)
        self._stop = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)

    def __enter__(self) -> Prefetcher[T]:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def __iter__(self) -> Iterator[T]:
        while True:
            try:
                (item,) = self._queue.get(timeout=0.05)
            except queue.Empty:
                if self._thread.is_alive() or not self._queue.empty():
                    continue
                if self._error is not None:
                    raise self._error from None
                raise RuntimeError("a Prefetcher gives items only inside its `with` block") from None
            yield item

    def _work(self) -> None:
        number = 0
        try:
            while not self._stop.is_set():
                item = (self._make(number),)
                number += 1
                while not self._stop.is_set():
                    try:
                        self._queue.put(item, timeout=0.05)
                        break
                    except queue.Full:
                        continue
        except BaseException as error:
            self._error = error
