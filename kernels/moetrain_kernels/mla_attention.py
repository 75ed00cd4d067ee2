"""Causal multi-head latent attention core for machines without a fused attention kernel.

torch's math attention builds the whole T x T matrix, half of which the causal mask throws away, and its flash path on
CPU needs equal query and value widths, which MLA has not. This core walks over blocks of queries, takes only the keys
a block may see, applies RoPE while it lays the heads out (so there is no concatenation pass), and gives the three
gradients in one backward. The formulas are those of the V3 paper, eqs 1-11, and RoPE turns adjacent pairs (2i, 2i +
1).

Legend: B rows, T tokens, H heads, N (nope) unrotated and P rotated query/key width, V value width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 64  # queries at a time: small enough to skip most of the masked half at T = 256
KEEP_PROBABILITIES = 1024  # up to this T the softmax output is kept for the backward, beyond it is computed again


def rotate_pairs(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> Tensor:
    """Turns the pairs (x[2i], x[2i + 1]) by the angle i: x, out [..., P]; cos, sin [..., P / 2], broadcastable."""
    if _is_complex(x) and _is_complex(out):
        turn = torch.complex(cos.to(x.dtype), sin.to(x.dtype))
        torch.mul(_as_complex(x), turn, out=_as_complex(out))
        return out
    even, odd = x[..., 0::2], x[..., 1::2]
    torch.mul(even, cos, out=out[..., 0::2]).addcmul_(odd, sin, value=-1.0)
    torch.mul(odd, cos, out=out[..., 1::2]).addcmul_(even, sin)
    return out


def _is_complex(x: Tensor) -> bool:
    """Whether pairs of x can be seen as complex numbers: one pass instead of four, where widths are even."""
    even = x.storage_offset() % 2 == 0 and x.stride(-1) == 1 and all(s % 2 == 0 for s in x.stride()[:-1])
    return even and x.dtype in (torch.float32, torch.float64)


def _as_complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


def _probabilities(q: Tensor, k: Tensor, start: int, later: Tensor, visible: Tensor | None) -> Tensor:
    """Softmax of one block of scores: q [BH, b, D], k [BH, end, D] -> [BH, b, end], at least fp32.

    ``later`` is True where a key of the block's own positions comes after the query.
    """
    scores = torch.bmm(q, k.transpose(1, 2))
    stat = torch.promote_types(scores.dtype, torch.float32)
    b = q.shape[1]
    if visible is not None:
        heads = scores.shape[0] // visible.shape[0]
        scores.view(visible.shape[0], heads, *scores.shape[1:]).masked_fill_(~visible.unsqueeze(1), -torch.inf)
    scores[:, :, start:].masked_fill_(later[:b, :b], -torch.inf)
    return torch.softmax(scores, dim=-1, dtype=stat)


class _Heads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, kv: Tensor, k_pe: Tensor, cos: Tensor, sin: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        B, T, H, QK = q.shape
        P = k_pe.shape[-1]
        N, V = QK - P, kv.shape[-1] - (QK - P)
        Q, K = q.new_empty(B, H, T, QK), q.new_empty(B, H, T, QK)
        cos_q, sin_q = cos.unsqueeze(1), sin.unsqueeze(1)  # [B or 1, 1, T, P / 2]
        qt = q.transpose(1, 2)
        torch.mul(qt[..., :N], scale, out=Q[..., :N])
        rotate_pairs(qt[..., N:], cos_q * scale, sin_q * scale, Q[..., N:])
        kvt = kv.transpose(1, 2)
        K[..., :N].copy_(kvt[..., :N])
        K[..., N:].copy_(rotate_pairs(k_pe, cos, sin, torch.empty_like(k_pe)).unsqueeze(1))
        Vs = kvt[..., N:].reshape(B * H, T, V)
        ctx.save_for_backward(cos, sin)
        ctx.scale, ctx.shape, ctx.P = scale, (B, T, H, QK), P
        return Q.view(B * H, T, QK), K.view(B * H, T, QK), Vs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dQ: Tensor, dK: Tensor, dV: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        B, T, H, QK = ctx.shape
        P, V = ctx.P, dV.shape[-1]
        N = QK - P
        dQ, dK = dQ.view(B, H, T, QK), dK.view(B, H, T, QK)
        dq = dQ.new_empty(B, T, H, QK)
        dqt = dq.transpose(1, 2)
        torch.mul(dQ[..., :N], ctx.scale, out=dqt[..., :N])
        cos_q, sin_q = cos.unsqueeze(1) * ctx.scale, sin.unsqueeze(1) * -ctx.scale  # the inverse turn
        rotate_pairs(dQ[..., N:], cos_q, sin_q, dqt[..., N:])
        dkv = dQ.new_empty(B, T, H, N + V)
        dkvt = dkv.transpose(1, 2)
        dkvt[..., :N].copy_(dK[..., :N])
        dkvt[..., N:].copy_(dV.view(B, H, T, V))
        dk = dK[..., N:].sum(1)
        return dq, dkv, rotate_pairs(dk, cos, -sin, torch.empty_like(dk)), None, None, None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, Q: Tensor, K: Tensor, Vs: Tensor, heads: int, document: Tensor | None) -> Tensor:
        BH, T, V = Vs.shape
        out = Q.new_empty(BH, T, V)
        keep = T <= KEEP_PROBABILITIES and any(ctx.needs_input_grad)
        kept = []
        later = _later(Q)
        for start in range(0, T, BLOCK):
            end = min(start + BLOCK, T)
            p = _probabilities(Q[:, start:end], K[:, :end], start, later, _visible(document, start, end)).to(Q.dtype)
            out[:, start:end] = torch.bmm(p, Vs[:, :end])
            if keep:
                kept.append(p)
        ctx.save_for_backward(Q, K, Vs, document, *kept)
        ctx.heads = heads
        return out.view(-1, heads, T, V).transpose(1, 2).reshape(-1, T, heads * V)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        Q, K, Vs, document, *kept = ctx.saved_tensors
        BH, T, V = Vs.shape
        dout = dy.view(-1, T, ctx.heads, V).transpose(1, 2).reshape(BH, T, V)
        later = _later(Q)
        dQ = torch.empty_like(Q)
        # from the last block, whose keys are all keys: its products are the whole of dK and dV, to which others add
        for i, start in reversed(list(enumerate(range(0, T, BLOCK)))):
            end = min(start + BLOCK, T)
            q, k, do = Q[:, start:end], K[:, :end], dout[:, start:end]
            p = kept[i] if kept else _probabilities(q, k, start, later, _visible(document, start, end)).to(Q.dtype)
            dp = torch.bmm(do, Vs[:, :end].transpose(1, 2))
            ds = torch._softmax_backward_data(dp, p, -1, p.dtype)
            dQ[:, start:end] = torch.bmm(ds, k)
            if end == T:
                dV, dK = torch.bmm(p.transpose(1, 2), do), torch.bmm(ds.transpose(1, 2), q)
            else:
                # products into a part of a tensor run matrix by matrix; into one of their own, as a batch
                dV[:, :end] += torch.bmm(p.transpose(1, 2), do)
                dK[:, :end] += torch.bmm(ds.transpose(1, 2), q)
        return dQ, dK, dV, None, None


def _later(x: Tensor) -> Tensor:
    return torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=x.device).triu_(1)


def _visible(document: Tensor | None, start: int, end: int) -> Tensor | None:
    """[B, b, end]: which keys belong to the query's own document."""
    if document is None:
        return None
    return document[:, start:end, None] == document[:, None, :end]


def mla_heads(
    q: Tensor, kv: Tensor, k_pe: Tensor, *, cos: Tensor, sin: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Lays the heads out for ``mla_attend``, with RoPE on the last P components and the scale in the queries.

    Args:
        q: [B, T, H, N + P], not rotated yet.
        kv: [B, T, H, N + V]: unrotated key, then value.
        k_pe: [B, T, P], one head, not rotated yet.
        cos, sin: [B or 1, T, P / 2].
        scale: softmax scale.

    Returns:
        queries and keys [B H, T, N + P], values [B H, T, V].
    """
    out: tuple[Tensor, Tensor, Tensor] = _Heads.apply(q, kv, k_pe, cos, sin, scale)
    return out


def mla_attend(Q: Tensor, K: Tensor, Vs: Tensor, *, heads: int, document_ids: Tensor | None = None) -> Tensor:
    """Causal attention over what ``mla_heads`` gave -> [B, T, H V].

    ``document_ids``: [B, T] integers; a token sees only keys of its own document. None = one document a row.
    """
    y: Tensor = _Attend.apply(Q, K, Vs, heads, document_ids)
    return y
