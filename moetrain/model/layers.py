"""The few layers everything else is made of, over the project's own products.

They exist beside ``torch.nn`` for one reason: each carries ``in_place_grad``, which lets the engine that owns the
gradients have weight gradients added inside the backward product (see ``moetrain_kernels.products``).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from moetrain_kernels.grouped_ffn import swiglu
from moetrain_kernels.products import embedding, linear
from moetrain_kernels.rms_norm import rms_norm


def at_least_fp32(x: Tensor) -> Tensor:
    """fp32 for half precisions; float64 stays float64, or a float64 run would not be one."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class Product(Protocol):
    """``x @ weight.T`` in some precision."""

    def __call__(self, x: Tensor, weight: Tensor, *, in_place_grad: bool) -> Tensor: ...


class SwiGLU(Protocol):
    """``down(silu(gate x) * up x)`` in some precision."""

    def __call__(self, x_ND: Tensor, gate_up: Tensor, down: Tensor, *, in_place_grad: bool) -> Tensor: ...


class Linear(nn.Module):
    """``x @ weight.T``; weight [out_features, in_features]; no DeepSeek layer has a bias."""

    in_place_grad: bool = False
    product: Product

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.product = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight, in_place_grad=self.in_place_grad)


class Embedding(nn.Module):
    """Rows of weight [vocab_size, hidden_size]."""

    in_place_grad: bool = False

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size))

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight, in_place_grad=self.in_place_grad)


class RMSNorm(nn.Module):
    """``weight * x / sqrt(mean(x^2) + eps)`` with statistics in fp32 at least."""

    in_place_grad: bool = False

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, in_place_grad=self.in_place_grad)


class MLP(nn.Module):
    """Dense and shared experts: ``down(silu(gate x) * up x)``; gate and up are one matrix, gate rows first."""

    product: SwiGLU

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.product = swiglu
        self.gate_up_proj = Linear(hidden_size, 2 * width)
        self.down_proj = Linear(width, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(
            x.reshape(-1, x.shape[-1]),
            self.gate_up_proj.weight,
            self.down_proj.weight,
            in_place_grad=self.down_proj.in_place_grad,
        )
        return y.view_as(x)
