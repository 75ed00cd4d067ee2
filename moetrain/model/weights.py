"""Where a model's numbers come from: a source gives any rows of any tensor, so a process asks for what it holds.

The whole of a 671B model is 2.7 TB in fp32 and fits no host, so nobody may make it and shard it afterwards. There are
two sources: fresh numbers from a seed, here, and released folders (``moetrain.checkpoint.hugging_face``).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

#: elements drawn at once, 4 MB in fp32; a multiple of 16 (see ``_chunks``)
CHUNK = 1 << 20
BIAS = "e_score_correction_bias"


class Weights(Protocol):
    """A source of parameters and buffers, under ``DeepSeek``'s names."""

    def fill(self, name: str, shape: Sequence[int], first: int, rows: Tensor) -> None:
        """Sets ``rows`` [n, ...], contiguous, of any dtype and device, to rows ``first`` to ``first + n`` of a tensor.

        ``shape`` is that of the whole tensor. Beside ``rows`` it needs some tens of MB at most.
        """
        ...


class FreshWeights:
    """Matrices normal with standard deviation ``std``, norms 1, biases 0 (training used 0.006, V2 and V3 papers).

    Each parameter has its own generator from (seed, name), so the values depend neither on the order nor on which other
    parameters exist, nor on how they are asked for.
    """

    def __init__(self, std: float, seed: int) -> None:
        self.std, self.seed = std, seed

    @torch.no_grad()
    def fill(self, name: str, shape: Sequence[int], first: int, rows: Tensor) -> None:
        if len(shape) == 1:
            rows.fill_(0.0 if name.endswith(BIAS) else 1.0)
            return
        flat = rows.view(-1)
        start = first * math.prod(shape[1:])
        end = start + flat.numel()
        generator = torch.Generator().manual_seed(self.seed * 0x9E3779B1 % 2**31 + zlib.crc32(name.encode()))
        at, room = 0, torch.empty(min(math.prod(shape), CHUNK + 15), dtype=torch.float32, device="cpu")
        for size in _chunks(math.prod(shape)):
            if at >= end:
                return
            values = room[:size].normal_(generator=generator)
            low, high = max(start, at), min(end, at + size)
            if low < high:
                flat[low - start : high - start].copy_(values[low - at : high - at].mul_(self.std))
            at += size


class Unfilled:
    """For a run that goes on from a checkpoint, which overwrites everything: drawing 671B takes up to an hour."""

    def fill(self, name: str, shape: Sequence[int], first: int, rows: Tensor) -> None:
        pass


def _chunks(total: int) -> Iterator[int]:
    """Sizes in which ``total`` normal numbers are drawn like all at once.

    torch's ``normal_fill`` (ATen/native/cpu/DistributionTemplates.h) takes 16 numbers of the generator for 16 values.
    Where 16 does not divide the total it draws the last 16 values again, over some of those before: they stay in one
    chunk. Fewer than 16 are drawn in another way, so that no chunk may have fewer where the whole has more.
    """
    while total >= CHUNK + 16:
        yield CHUNK
        total -= CHUNK
    if total:
        yield total
