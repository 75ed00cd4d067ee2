"""Products with weights whose gradient is added where it is kept.

Autograd computes each weight gradient into a fresh buffer and then adds that buffer to ``weight.grad``: for a window
of K micro-batches this writes and reads every gradient K times more than needed. The products here can instead hand
the accumulation to the matrix product itself (``addmm_`` into ``weight.grad``), which needs no zero-fill, no temporary
and no adding pass. That is only right where nothing listens on the weight's own gradient hooks
(DistributedDataParallel does), so it is off unless the engine that owns the gradients asks for it.

Legend: N rows, I inputs, O outputs, V vocabulary, D width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def add_weight_gradient(weight: Tensor, dy_NO: Tensor, x_NI: Tensor) -> None:
    """Adds ``dy_NO.T @ x_NI`` to ``weight.grad`` ([O, I]); makes the gradient where there is none yet."""
    if weight.grad is None:
        weight.grad = torch.mm(dy_NO.t(), x_NI)
    else:
        weight.grad.addmm_(dy_NO.t(), x_NI)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, in_place: bool) -> Tensor:
        ctx.save_for_backward(x)
        # Kept as the object it is: saved-tensor hooks (recompute, offload) may hand back a copy, and the gradient
        # has to reach this very parameter.
        ctx.weight = weight
        ctx.in_place = in_place
        return torch.mm(x.reshape(-1, x.shape[-1]), weight.t()).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x,) = ctx.saved_tensors
        weight = ctx.weight
        dy_NO = dy.reshape(-1, dy.shape[-1])
        x_NI = x.reshape(-1, x.shape[-1])
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = torch.mm(dy_NO, weight).view_as(x)
        if ctx.needs_input_grad[1]:
            if ctx.in_place:
                add_weight_gradient(weight, dy_NO, x_NI)
            else:
                dw = torch.mm(dy_NO.t(), x_NI)
        return dx, dw, None


def linear(x: Tensor, weight: Tensor, *, in_place_grad: bool = False) -> Tensor:
    """``x @ weight.T``.

    Args:
        x: [..., I].
        weight: [O, I], the dtype of x.
        in_place_grad: add the weight's gradient into ``weight.grad`` inside the backward product (weight must be a
        leaf).

    Returns:
        [..., O], the dtype of x.
    """
    y: Tensor = _Linear.apply(x, weight, in_place_grad)
    return y


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, in_place: bool) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.weight = weight
        ctx.in_place = in_place
        return torch.nn.functional.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None]:
        (ids,) = ctx.saved_tensors
        weight = ctx.weight
        if ctx.in_place and weight.grad is not None:
            weight.grad.index_add_(0, ids.reshape(-1), dy.reshape(-1, dy.shape[-1]))
            return None, None, None
        dw = torch.zeros_like(weight).index_add_(0, ids.reshape(-1), dy.reshape(-1, dy.shape[-1]))
        if ctx.in_place:
            weight.grad = dw
            return None, None, None
        return None, dw, None


def embedding(ids: Tensor, weight: Tensor, *, in_place_grad: bool = False) -> Tensor:
    """Rows ``weight[ids]``: ids int64 [...], weight [V, D] -> [..., D]."""
    y: Tensor = _Embedding.apply(ids, weight, in_place_grad)
    return y


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h_ND: Tensor, weight: Tensor, target_N: Tensor, in_place: bool, chunk: int) -> Tensor:
        needs_h, needs_w = ctx.needs_input_grad[:2]
        stat = torch.promote_types(h_ND.dtype, torch.float32)
        rows, vocabulary = h_ND.shape[0], weight.shape[0]
        total = torch.zeros((), dtype=stat, device=h_ND.device)
        dh = torch.empty_like(h_ND) if needs_h else None
        dw = None
        valid_N = target_N != -100
        safe_N1 = target_N.where(valid_N, 0).unsqueeze(1)
        # two buffers for all chunks: fresh ones of this size would be mapped and cleared by the system each time
        logits_buffer = h_ND.new_empty(min(chunk, rows), vocabulary)
        p_buffer = torch.empty_like(logits_buffer, dtype=stat)
        for start in range(0, rows, chunk):
            end = min(start + chunk, rows)
            h, valid, safe = h_ND[start:end], valid_N[start:end], safe_N1[start:end]
            logits = torch.mm(h, weight.t(), out=logits_buffer[: end - start])
            p = torch.softmax(logits, dim=-1, dtype=stat, out=p_buffer[: end - start])
            # the largest probability is exp(largest logit - logsumexp), and never small: no pass of its own for
            # logsumexp
            logsumexp = logits.amax(dim=-1).to(stat) - p.amax(dim=-1).log()
            loss = logsumexp - logits.gather(1, safe).squeeze(1).to(stat)
            total = total + loss.where(valid, 0).sum()
            if not (needs_h or needs_w):
                continue
            # softmax minus one-hot is the gradient of the summed loss; ignored rows have none, which is cheaper to say
            # on the narrow side
            p.scatter_add_(1, safe, p.new_full((), -1.0).expand(safe.shape))
            p = p.to(h.dtype)
            if dh is not None:
                torch.mm(p, weight, out=dh[start:end]).mul_(valid.unsqueeze(1))
            if needs_w:
                h = h * valid.unsqueeze(1)
                if dw is None:
                    dw = torch.mm(p.t(), h)
                else:
                    dw.addmm_(p.t(), h)
        ctx.save_for_backward(dh, dw)
        ctx.weight = weight
        ctx.in_place = in_place
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        dh, dw = ctx.saved_tensors
        if dh is not None:
            dh = dh * g.to(dh.dtype)
        if dw is not None:
            scale = g.to(dw.dtype)
            if ctx.in_place and ctx.weight.grad is not None:
                ctx.weight.grad.addcmul_(dw, scale)
                dw = None
            else:
                dw = dw * scale
                if ctx.in_place:
                    ctx.weight.grad, dw = dw, None
        return dh, dw, None, None, None


def linear_cross_entropy(
    h_ND: Tensor, weight: Tensor, target_N: Tensor, *, in_place_grad: bool = False, chunk: int = 128
) -> Tensor:
    """Summed cross-entropy of ``h_ND @ weight.T`` against ``target_N``; the [N, V] logits never exist whole.

    The gradients are computed chunk by chunk in the forward, so a backward costs no product. Between the two it holds
    one gradient-sized buffer for the weight instead of [N, V] logits and their gradient.

    Args:
        h_ND: hidden states.
        weight: output head [V, D], the dtype of h_ND.
        target_N: int64, -100 = ignored (all ignored gives 0 and zero gradients).
        in_place_grad: add the weight's gradient into ``weight.grad`` (weight must be a leaf).
        chunk: rows whose logits exist at a time.

    Returns:
        the sum over valid rows, at least fp32, shape [].
    """
    loss: Tensor = _LinearCrossEntropy.apply(h_ND, weight, target_N, in_place_grad, chunk)
    return loss
