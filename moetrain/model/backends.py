"""Which implementation of attention, routers and experts' products a model runs on, chosen once for its device.

A layer never asks what it runs on: it calls the verb it was given. ``Backend.for_device`` is the one place that
decides, and ``describe`` is what a run prints at its start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from moetrain.model.gate import Gate, Route, route_by_torch
from moetrain.model.rope import Rotation
from moetrain_kernels.grouped_ffn import grouped_swiglu
from moetrain_kernels.mla_attention import mla_attend, mla_heads


class Routed(NamedTuple):
    """What the experts of this device have to do. R rows, N = entries (row, expert) sorted by expert, E local experts.

    ``position_N[offset_R[r] : offset_R[r + 1]]`` are the places of row r's entries in the sorted order.
    """

    x_RD: Tensor
    weight_N: Tensor
    row_N: Tensor
    position_N: Tensor
    offset_R: Tensor
    counts_E: Tensor


Heads = tuple[Tensor, Tensor, Tensor]


class Attention(Protocol):
    """Multi-head attention in two steps, since what lies between them is large and cheap to make again."""

    def heads(self, q: Tensor, kv: Tensor, k_pe: Tensor, rotation: Rotation, scale: float) -> Heads:
        """q [B, T, H, N + P], kv [B, T, H, N + V], k_pe [B, T, P] -> queries, keys, values, rotated."""
        ...

    def attend(self, heads: Heads, count: int, scale: float, document_ids: Tensor | None) -> Tensor:
        """-> [B, T, H * V], with ``count`` heads."""
        ...


class Experts(Protocol):
    """SwiGLU of every entry, weighted and summed over the entries of each row: [R, D]."""

    def __call__(self, routed: Routed, gate_up: Tensor, down: Tensor, *, in_place_grad: bool) -> Tensor: ...


class BlockedAttention:
    """The project's own core: blocks of queries, no fused kernel needed, every dtype."""

    def heads(self, q: Tensor, kv: Tensor, k_pe: Tensor, rotation: Rotation, scale: float) -> Heads:
        return mla_heads(q, kv, k_pe, cos=rotation.cos, sin=rotation.sin, scale=scale)

    def attend(self, heads: Heads, count: int, scale: float, document_ids: Tensor | None) -> Tensor:
        return mla_attend(*heads, heads=count, document_ids=document_ids)


class SdpaAttention:
    """torch's scaled_dot_product_attention, which picks a fused CUDA kernel where one takes these head sizes."""

    def heads(self, q: Tensor, kv: Tensor, k_pe: Tensor, rotation: Rotation, scale: float) -> Heads:
        P = k_pe.shape[-1]
        N = q.shape[-1] - P
        cos, sin = rotation.cos.to(q.dtype), rotation.sin.to(q.dtype)
        k_rot = _rotated(k_pe, cos, sin).unsqueeze(2).expand(-1, -1, q.shape[2], -1)
        q = torch.cat([q[..., :N], _rotated(q[..., N:], cos.unsqueeze(2), sin.unsqueeze(2))], dim=-1)
        k = torch.cat([kv[..., :N], k_rot], dim=-1)
        q, k, v = (rearrange(x, "b t h d -> b h t d") for x in (q, k, kv[..., N:]))
        return q, k, v

    def attend(self, heads: Heads, count: int, scale: float, document_ids: Tensor | None) -> Tensor:
        mask = None
        if document_ids is not None:
            same = document_ids[:, :, None] == document_ids[:, None, :]
            mask = same.tril().unsqueeze(1)
        y = F.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=mask is None, scale=scale)
        return rearrange(y, "b h t v -> b t (h v)")


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


def looped_experts(routed: Routed, gate_up: Tensor, down: Tensor, *, in_place_grad: bool) -> Tensor:
    """One product per expert (CPU, and every dtype that grouped products lack). Reads the counts on the host."""
    return grouped_swiglu(
        routed.x_RD,
        gate_up,
        down,
        routed.weight_N,
        row_N=routed.row_N,
        position_N=routed.position_N,
        offset_R=routed.offset_R,
        counts=routed.counts_E.tolist(),
        in_place_grad=in_place_grad,
    )


def grouped_mm_experts(routed: Routed, gate_up: Tensor, down: Tensor, *, in_place_grad: bool) -> Tensor:
    """torch's grouped products: no host synchronisation (CUDA, bf16). Weight gradients go through autograd."""
    ends = routed.counts_E.cumsum(0, dtype=torch.int32)
    x_ND = routed.x_RD.index_select(0, routed.row_N)
    gate, up = F.grouped_mm(x_ND, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    h = (F.silu(gate) * up * routed.weight_N.unsqueeze(1)).to(x_ND.dtype)
    y_ND = F.grouped_mm(h, down.transpose(1, 2), offs=ends)
    return F.embedding_bag(routed.position_N, y_ND, routed.offset_R, mode="sum")


def triton_experts(routed: Routed, gate_up: Tensor, down: Tensor, *, in_place_grad: bool) -> Tensor:
    """The project's own kernels: gathering, grouped products, SwiGLU with the router's weight. No host sync either."""
    from moetrain_kernels import triton_grouped, triton_moe

    where = routed.row_N, routed.position_N, routed.offset_R
    gu = triton_grouped.grouped_product(triton_moe.gather_rows(routed.x_RD, *where), gate_up, routed.counts_E)
    h = triton_moe.swiglu(gu, routed.weight_N.float())
    y: Tensor = triton_moe.sum_rows(triton_grouped.grouped_product(h, down, routed.counts_E), *where)
    return y


def triton_route(gate: Gate, logits_TE: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
    """Scores and choice in one pass of the project's own kernel; scores are fp32."""
    from moetrain_kernels import triton_moe

    groups, best = (gate.groups, gate.top_groups) if gate.grouped else (1, 1)
    bias = getattr(gate, "e_score_correction_bias", None)
    scores, choice, _ = triton_moe.route(logits_TE, bias, gate.top_k, groups, best, gate.sigmoid, gate.two_of_group)
    return scores, lambda: choice


#: logits that exist at a time: what a CPU's cache holds; on a GPU enough rows (512 of V3's vocabulary) that the head's
#: products are not bound by reading its weight
LOGITS, LOGITS_ON_GPU = 1 << 21, 1 << 26


class Backend(NamedTuple):
    """The choices, and the names a run prints; ``logits``: how many of them exist at a time."""

    attention: Attention
    experts: Experts
    describe: str
    logits: int = LOGITS
    route: Route = route_by_torch

    @classmethod
    def for_device(cls, device: torch.device, dtype: torch.dtype, experts: str = "torch") -> Backend:
        """CUDA takes torch's fused attention, and grouped products in bf16; everything else the project's own.

        ``experts`` of bf16 on CUDA: ``torch`` or ``triton``, which routes by a kernel, too.
        """
        if device.type == "cuda" and dtype == torch.bfloat16 and experts == "triton":
            what = "attention: torch sdpa, routers and experts: Triton kernels"
            return cls(SdpaAttention(), triton_experts, what, LOGITS_ON_GPU, triton_route)
        if device.type == "cuda" and dtype == torch.bfloat16:
            return cls(
                SdpaAttention(), grouped_mm_experts, "attention: torch sdpa, experts: torch grouped_mm", LOGITS_ON_GPU
            )
        if device.type == "cuda":
            return cls(SdpaAttention(), looped_experts, "attention: torch sdpa, experts: a product each", LOGITS_ON_GPU)
        return REFERENCE


REFERENCE = Backend(BlockedAttention(), looped_experts, "attention: blocked, experts: a product each")
