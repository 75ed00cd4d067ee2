"""Rows on their way to experts as E4M3 with power-of-two scales: half the bytes of bf16 (V3 paper 3.3.3).

A scale is a power of two, so one byte says it: a row of D values is sent as D + ceil(D / 128) bytes. What arrives is
exactly what the experts' products would have made of the row themselves.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moetrain_kernels.quantise import ACTIVATIONS, GRADIENTS, Quantised, tiles


class Fp8Rows:
    """See ``moetrain.parallel.ep.Wire``."""

    def encode(self, x_RD: Tensor, *, gradient: bool) -> Tensor:
        """-> uint8 [R, D + ceil(D / 128)] (gloo and NCCL send bytes, and no FP8)."""
        q = tiles(x_RD, power_of_two=True, floor=GRADIENTS if gradient else ACTIVATIONS)
        exponent = (q.scale.view(torch.int32) >> 23).to(torch.uint8)  # the sign is 0
        return torch.cat([q.values.view(torch.uint8), exponent], dim=1)

    def decode(self, sent: Tensor, like: Tensor) -> Tensor:
        D = like.shape[1]
        scale = (sent[:, D:].to(torch.int32) << 23).view(torch.float32)
        values = sent[:, :D].contiguous().view(torch.float8_e4m3fn)
        return Quantised(values, scale, (1, 128)).dequantise(like.dtype)
