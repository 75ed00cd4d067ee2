"""RMSNorm with a backward of its own.

torch has a fused RMSNorm on CUDA; on CPU its backward is a chain of a dozen passes (measured 8 times slower than this
at 1024 x 256). Statistics are in fp32 at least, as DeepSeek computes them (facts: V3 inference code, ``RMSNorm``).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, in_place: bool) -> Tensor:
        stat = torch.promote_types(x.dtype, torch.float32)
        xs = x.to(stat)
        scale = (torch.linalg.vecdot(xs, xs) / x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
        ctx.save_for_backward(x, scale)
        ctx.weight = weight
        ctx.in_place = in_place
        y: Tensor = (xs * scale).mul_(weight).to(x.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, scale = ctx.saved_tensors
        weight = ctx.weight
        normed = x.to(scale.dtype) * scale
        dy = dy.to(scale.dtype)
        dw = None
        if ctx.needs_input_grad[1]:
            dw = (dy * normed).reshape(-1, dy.shape[-1]).sum(0).to(weight.dtype)
            if ctx.in_place:
                if weight.grad is None:
                    weight.grad = dw
                else:
                    weight.grad.add_(dw)
                dw = None
        g = dy * weight
        along = torch.linalg.vecdot(g, normed).div_(x.shape[-1]).unsqueeze(-1)
        return g.addcmul_(normed, along, value=-1.0).mul_(scale).to(x.dtype), dw, None, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, in_place_grad: bool = False) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)`` over the last dimension.

    Args:
        x: [..., D], any float dtype.
        weight: [D].
        eps: added to the mean square.
        in_place_grad: add the weight's gradient into ``weight.grad`` (weight must be a leaf).

    Returns:
        [..., D], the dtype of x.
    """
    y: Tensor = _RMSNorm.apply(x, weight, eps, in_place_grad)
    return y
