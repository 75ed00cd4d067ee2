"""Triton kernels around the experts' products: rows to their experts and back, SwiGLU, the router.

``gather_rows`` and ``sum_rows`` are each other's gradient. SwiGLU takes the router's weight in the same pass, and
forward it may leave as E4M3 tiles (what the down product takes) without ever being written in bf16; backward it starts
from tiles of its input, as V3 keeps them, and makes its output again beside the gradients (paper 3.3.3). The router
does scores, bias, group limit, top-k and histogram in one pass over the logits.

Legend: T tokens, R rows, N entries (row, expert), D width, m expert width, E experts, K experts a token, G groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from moetrain_kernels.quantise import ACTIVATIONS, TILE, Quantised
from moetrain_kernels.triton_quantise import E4M3, _largest, _scale

# rows to entries, entries to rows


@triton.jit
def gather_kernel(x, out, row_N, N, D, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = (n < N)[:, None] & (d < D)[None, :]
    rows = tl.load(row_N + n, mask=n < N, other=0).to(tl.int64)
    v = tl.load(x + rows[:, None] * D + d[None, :], mask=mask, other=0.0)
    tl.store(out + n.to(tl.int64)[:, None] * D + d[None, :], v, mask=mask)


@triton.jit
def sum_kernel(y, out, position_N, offset_R, R, N, D, BLOCK_D: tl.constexpr):
    """A row of the result: the entries at position_N[offset_R[r] : offset_R[r + 1]], summed in fp32."""
    r = tl.program_id(0)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    first = tl.load(offset_R + r)
    last = tl.where(r + 1 < R, tl.load(offset_R + r + 1, mask=r + 1 < R, other=0), N)
    acc = tl.zeros((BLOCK_D,), dtype=tl.float32)
    for at in range(first, last):
        n = tl.load(position_N + at).to(tl.int64)
        acc += tl.load(y + n * D + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(out + r.to(tl.int64) * D + d, acc.to(out.dtype.element_ty), mask=d < D)


@torch.library.custom_op("moetrain::gather_rows", mutates_args=())
def gather_rows(x: Tensor, row_N: Tensor, position_N: Tensor, offset_R: Tensor) -> Tensor:
    """x [R, D] -> [N, D], entry n being row ``row_N[n]``; the other two say the same from the rows' side."""
    N, D = row_N.shape[0], x.shape[1]
    out = x.new_empty(N, D)
    if N:
        grid = triton.cdiv(N, 16), triton.cdiv(D, 512)
        gather_kernel[grid](x.contiguous(), out, row_N, N, D, BLOCK_N=16, BLOCK_D=512, num_warps=8)
    return out


@torch.library.custom_op("moetrain::sum_rows", mutates_args=())
def sum_rows(y: Tensor, row_N: Tensor, position_N: Tensor, offset_R: Tensor) -> Tensor:
    """y [N, D] -> [R, D]: each row the sum of its entries, zero where it has none."""
    (R,), (N, D) = offset_R.shape, y.shape
    out = y.new_empty(R, D)
    if R:
        grid = R, triton.cdiv(D, 1024)
        sum_kernel[grid](y.contiguous(), out, position_N, offset_R, R, N, D, BLOCK_D=1024, num_warps=4)
    return out


@gather_rows.register_fake
def _(x: Tensor, row_N: Tensor, position_N: Tensor, offset_R: Tensor) -> Tensor:
    return x.new_empty(row_N.shape[0], x.shape[1])


@sum_rows.register_fake
def _(y: Tensor, row_N: Tensor, position_N: Tensor, offset_R: Tensor) -> Tensor:
    return y.new_empty(offset_R.shape[0], y.shape[1])


def _keep_routes(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:])


gather_rows.register_autograd(
    lambda ctx, dy: (sum_rows(dy, *ctx.saved_tensors), None, None, None), setup_context=_keep_routes
)
sum_rows.register_autograd(
    lambda ctx, dy: (gather_rows(dy, *ctx.saved_tensors), None, None, None), setup_context=_keep_routes
)

# SwiGLU


@triton.jit
def swiglu_kernel(
    gu, weight, h, q, s, N, m, WEIGHTED: tl.constexpr, QUANTISE: tl.constexpr, POWER_OF_TWO: tl.constexpr, floor,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    j = tl.program_id(1) * 128 + tl.arange(0, 128)
    mask = (n < N)[:, None] & (j < m)[None, :]
    at = n.to(tl.int64)[:, None] * (2 * m) + j[None, :]
    gate = tl.load(gu + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gu + at + m, mask=mask, other=0.0).to(tl.float32)
    v = gate * tl.sigmoid(gate) * up
    if WEIGHTED:
        v *= tl.load(weight + n, mask=n < N, other=0.0)[:, None]
    out = n.to(tl.int64)[:, None] * m + j[None, :]
    if QUANTISE:
        scale = _scale(_largest(v, 1), floor, POWER_OF_TWO)
        tl.store(q + out, tl.div_rn(v, scale[:, None]).to(tl.float8e4nv), mask=mask)
        tl.store(s + n.to(tl.int64) * tl.cdiv(m, 128) + tl.program_id(1), scale, mask=n < N)
    else:
        tl.store(h + out, v.to(h.dtype.element_ty), mask=mask)


@triton.jit
def swiglu_backward_kernel(
    gu, gu_scale, weight, dh, dgu, dweight, again, again_scale, N, m, floor,
    WEIGHTED: tl.constexpr, TILES: tl.constexpr, POWER_OF_TWO: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Whole rows: gradients of gate and up, of the weight, and with TILES the output again as tiles."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = n.to(tl.int64)[:, None]
    w = tl.load(weight + n, mask=n < N, other=0.0)[:, None] if WEIGHTED else 1.0
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for j0 in range(0, m, 128):
        j = j0 + tl.arange(0, 128)
        mask = (n < N)[:, None] & (j < m)[None, :]
        at = row * (2 * m) + j[None, :]
        gate = tl.load(gu + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(gu + at + m, mask=mask, other=0.0).to(tl.float32)
        if TILES:
            scales = gu_scale + row * tl.cdiv(2 * m, 128)
            gate *= tl.load(scales + (j // 128)[None, :], mask=mask, other=0.0)
            up *= tl.load(scales + ((j + m) // 128)[None, :], mask=mask, other=0.0)
        g = tl.load(dh + row * m + j[None, :], mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        act = gate * sigmoid
        h = act * up
        if WEIGHTED:
            total += tl.sum(g * h, axis=1)
        g *= w
        tl.store(dgu + at + m, (g * act).to(dgu.dtype.element_ty), mask=mask)
        slope = sigmoid * (1 + gate * (1 - sigmoid))
        tl.store(dgu + at, (g * up * slope).to(dgu.dtype.element_ty), mask=mask)
        if TILES:
            h *= w
            scale = _scale(_largest(h, 1), floor, POWER_OF_TWO)
            tl.store(again + row * m + j[None, :], tl.div_rn(h, scale[:, None]).to(tl.float8e4nv), mask=mask)
            tl.store(again_scale + n.to(tl.int64) * tl.cdiv(m, 128) + j0 // 128, scale, mask=n < N)
    if WEIGHTED:
        tl.store(dweight + n, total, mask=n < N)


@torch.library.custom_op("moetrain::swiglu_tiles", mutates_args=())
def _swiglu_tiles(gu: Tensor, weight_N: Tensor | None, power_of_two: bool) -> tuple[Tensor, Tensor]:
    N, m = gu.shape[0], gu.shape[1] // 2
    q = torch.empty(N, m, dtype=E4M3, device=gu.device)
    s = torch.empty(N, triton.cdiv(m, TILE), dtype=torch.float32, device=gu.device)
    if N:
        swiglu_kernel[(triton.cdiv(N, 32), s.shape[1])](
            gu, weight_N if weight_N is not None else s, gu, q, s, N, m, WEIGHTED=weight_N is not None, QUANTISE=True,
            POWER_OF_TWO=power_of_two, floor=ACTIVATIONS, BLOCK_N=32, num_warps=4,
        )  # fmt: skip
    return q, s


@_swiglu_tiles.register_fake
def _(gu: Tensor, weight_N: Tensor | None, power_of_two: bool) -> tuple[Tensor, Tensor]:
    N, m = gu.shape[0], gu.shape[1] // 2
    return gu.new_empty(N, m, dtype=E4M3), gu.new_empty(N, -(-m // TILE), dtype=torch.float32)


def swiglu_tiles(gu: Tensor, weight_N: Tensor | None, *, power_of_two: bool = False) -> Quantised:
    """``silu(gate) * up * weight`` of gu [N, 2m] (gate columns first), weight fp32, as tiles [N, m]."""
    q, s = _swiglu_tiles(gu, weight_N, power_of_two)
    return Quantised(q, s, (1, TILE))


@torch.library.custom_op("moetrain::swiglu_backward_tiles", mutates_args=())
def _swiglu_backward_tiles(
    gu: Tensor, gu_scale: Tensor, weight_N: Tensor | None, dh: Tensor, dtype: torch.dtype, power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    N, m = dh.shape
    dgu = torch.empty(N, 2 * m, dtype=dtype, device=dh.device)
    dweight = torch.empty(N if weight_N is not None else 0, dtype=torch.float32, device=dh.device)
    q = torch.empty(N, m, dtype=E4M3, device=dh.device)
    s = torch.empty(N, triton.cdiv(m, TILE), dtype=torch.float32, device=dh.device)
    if N:
        swiglu_backward_kernel[(triton.cdiv(N, 16),)](
            gu, gu_scale, weight_N if weight_N is not None else s, dh, dgu, dweight, q, s, N, m, ACTIVATIONS,
            WEIGHTED=weight_N is not None, TILES=True, POWER_OF_TWO=power_of_two, BLOCK_N=16, num_warps=4,
        )  # fmt: skip
    return dgu, dweight, q, s


@_swiglu_backward_tiles.register_fake
def _(
    gu: Tensor, gu_scale: Tensor, weight_N: Tensor | None, dh: Tensor, dtype: torch.dtype, power_of_two: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    N, m = dh.shape
    weights, scales = N if weight_N is not None else 0, -(-m // TILE)
    return (
        dh.new_empty(N, 2 * m, dtype=dtype), dh.new_empty(weights, dtype=torch.float32), dh.new_empty(N, m, dtype=E4M3),
        dh.new_empty(N, scales, dtype=torch.float32),
    )  # fmt: skip


class SwiGLUGradients(NamedTuple):
    """Of gate and up [N, 2m], of the weight [N] (none without one), and the output again, as tiles [N, m]."""

    dgu: Tensor
    dweight: Tensor | None
    again: Quantised


def swiglu_backward_tiles(
    gu: Quantised, weight_N: Tensor | None, dh: Tensor, *, dtype: torch.dtype, power_of_two: bool = False
) -> SwiGLUGradients:
    """From tiles of the input, gu [N, 2m], and dh [N, m]; ``dtype`` is that of the first gradient."""
    dgu, dweight, q, s = _swiglu_backward_tiles(gu.values, gu.scale, weight_N, dh, dtype, power_of_two)
    return SwiGLUGradients(dgu, None if weight_N is None else dweight, Quantised(q, s, (1, TILE)))


@torch.library.custom_op("moetrain::swiglu", mutates_args=())
def swiglu(gu: Tensor, weight_N: Tensor) -> Tensor:
    """``silu(gate) * up * weight``: gu [N, 2m], weight fp32 [N] -> [N, m], in gu's dtype. Differentiable."""
    N, m = gu.shape[0], gu.shape[1] // 2
    h = gu.new_empty(N, m)
    if N:
        swiglu_kernel[(triton.cdiv(N, 32), triton.cdiv(m, 128))](
            gu.contiguous(), weight_N, h, h, h, N, m, WEIGHTED=True, QUANTISE=False, POWER_OF_TWO=False, floor=0.0,
            BLOCK_N=32, num_warps=4,
        )  # fmt: skip
    return h


@torch.library.custom_op("moetrain::swiglu_backward", mutates_args=())
def swiglu_backward(gu: Tensor, weight_N: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of gu and of the weight."""
    N, m = dh.shape
    dgu, dweight = torch.empty_like(gu), torch.empty_like(weight_N)
    if N:
        swiglu_backward_kernel[(triton.cdiv(N, 16),)](
            gu, gu, weight_N, dh.contiguous(), dgu, dweight, gu, gu, N, m, 0.0,
            WEIGHTED=True, TILES=False, POWER_OF_TWO=False, BLOCK_N=16, num_warps=4,
        )  # fmt: skip
    return dgu, dweight


@swiglu.register_fake
def _(gu: Tensor, weight_N: Tensor) -> Tensor:
    return gu.new_empty(gu.shape[0], gu.shape[1] // 2)


@swiglu_backward.register_fake
def _(gu: Tensor, weight_N: Tensor, dh: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gu), torch.empty_like(weight_N)


def _keep_inputs(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0].contiguous(), inputs[1])


swiglu.register_autograd(lambda ctx, dh: swiglu_backward(*ctx.saved_tensors, dh), setup_context=_keep_inputs)

# the router


@triton.jit
def router_kernel(
    logits, bias, scores, choice, counts, T, E, K, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr, BIASED: tl.constexpr, SUM_OF_TWO: tl.constexpr,
    BLOCK_T: tl.constexpr, GROUPS_2: tl.constexpr, GROUP_2: tl.constexpr,
):  # fmt: skip
    """Scores, choice and histogram. GROUPS_2 and GROUP_2: groups and experts of a group, to the next power of two."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    lane = tl.arange(0, GROUPS_2 * GROUP_2)
    group, inside = lane // GROUP_2, lane % GROUP_2
    expert = group * (E // GROUPS) + inside
    there = (group < GROUPS) & (inside < E // GROUPS)
    mask = (t < T)[:, None] & there[None, :]
    at = t.to(tl.int64)[:, None] * E + expert[None, :]
    x = tl.load(logits + at, mask=mask, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        s = tl.sigmoid(x)
    else:
        s = tl.exp(x - tl.max(tl.where(mask, x, -1e38), axis=1)[:, None])
        s = tl.where(mask, s, 0.0)
        s /= tl.sum(s, axis=1)[:, None]
    tl.store(scores + at, s, mask=mask)
    if BIASED:
        s += tl.load(bias + expert, mask=there, other=0.0)[None, :]
    s = tl.where(there[None, :] & (s == s), s, float("-inf"))  # what is no number must not choose an empty lane
    if TOP_GROUPS < GROUPS:
        by_group = tl.reshape(s, (BLOCK_T, GROUPS_2, GROUP_2))
        best = tl.max(by_group, axis=2)
        if SUM_OF_TWO:
            first = tl.argmax(by_group, axis=2)
            others = tl.where(tl.arange(0, GROUP_2)[None, None, :] == first[:, :, None], float("-inf"), by_group)
            best += tl.max(others, axis=2)
        best = tl.where((tl.arange(0, GROUPS_2) < GROUPS)[None, :], best, float("-inf"))
        open_groups = tl.zeros((BLOCK_T, GROUPS_2), dtype=tl.int32)
        for _ in range(TOP_GROUPS):
            taken = tl.arange(0, GROUPS_2)[None, :] == tl.argmax(best, axis=1)[:, None]
            open_groups += taken.to(tl.int32)
            best = tl.where(taken, float("-inf"), best)
        s = tl.reshape(tl.where(open_groups[:, :, None] > 0, by_group, float("-inf")), (BLOCK_T, GROUPS_2 * GROUP_2))
    chosen = tl.zeros((BLOCK_T, GROUPS_2 * GROUP_2), dtype=tl.int32)
    for k in range(K):
        place = tl.argmax(s, axis=1)
        taken = lane[None, :] == place[:, None]
        number = (place // GROUP_2) * (E // GROUPS) + place % GROUP_2
        tl.store(choice + t.to(tl.int64) * K + k, number.to(tl.int64), mask=t < T)
        chosen += taken.to(tl.int32)
        s = tl.where(taken, float("-inf"), s)
    many = tl.sum(tl.where((t < T)[:, None], chosen, 0), axis=0)
    tl.atomic_add(counts + expert, many.to(tl.int64), mask=there)


@torch.library.custom_op("moetrain::route", mutates_args=())
def route(
    logits_TE: Tensor, bias_E: Tensor | None, top_k: int, groups: int, top_groups: int, sigmoid: bool, sum_of_two: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Scores fp32 [T, E] (sigmoid or softmax), choice int64 [T, K] (best first), histogram int64 [E].

    ``bias_E`` only chooses. Of ``groups`` the best ``top_groups`` stay, by the sum of their two best experts (V3) or by
    their best (V2). Equal scores: the lower expert. Scores are differentiable.
    """
    T, E = logits_TE.shape
    scores = torch.empty(T, E, dtype=torch.float32, device=logits_TE.device)
    choice = torch.empty(T, top_k, dtype=torch.int64, device=logits_TE.device)
    counts = torch.zeros(E, dtype=torch.int64, device=logits_TE.device)
    if T:
        router_kernel[(triton.cdiv(T, 4),)](
            logits_TE.contiguous(), scores if bias_E is None else bias_E, scores, choice, counts, T, E, top_k,
            GROUPS=groups, TOP_GROUPS=top_groups, SIGMOID=sigmoid, BIASED=bias_E is not None, SUM_OF_TWO=sum_of_two,
            BLOCK_T=4, GROUPS_2=triton.next_power_of_2(groups), GROUP_2=triton.next_power_of_2(E // groups),
            num_warps=4,
        )  # fmt: skip
    return scores, choice, counts


@route.register_fake
def _(
    logits_TE: Tensor, bias_E: Tensor | None, top_k: int, groups: int, top_groups: int, sigmoid: bool, sum_of_two: bool
) -> tuple[Tensor, Tensor, Tensor]:
    T, E = logits_TE.shape
    new = logits_TE.new_empty
    return new(T, E, dtype=torch.float32), new(T, top_k, dtype=torch.int64), new(E, dtype=torch.int64)


def _keep_scores(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.sigmoid, ctx.dtype = inputs[5], inputs[0].dtype
    ctx.save_for_backward(output[0])
    ctx.mark_non_differentiable(*output[1:])


def _route_gradient(ctx: Any, dscores: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    (s,) = ctx.saved_tensors
    dx = dscores * s * (1 - s) if ctx.sigmoid else s * (dscores - (dscores * s).sum(dim=1, keepdim=True))
    return dx.to(ctx.dtype), None, None, None, None, None, None


route.register_autograd(_route_gradient, setup_context=_keep_scores)


def shipped() -> Iterator[tuple[str, Any, dict[str, str], dict[str, Any], dict[str, int]]]:
    """The kernels of this file as ``moetrain_kernels.aot`` compiles them, for V3's shapes."""
    e4m3 = "*fp8e4nv"
    yield "gather rows", gather_kernel, {
        "x": "*bf16", "out": "*bf16", "row_N": "*i64", "N": "i32", "D": "i32",
    }, {"BLOCK_N": 16, "BLOCK_D": 512}, {"num_warps": 8}  # fmt: skip
    yield "sum rows", sum_kernel, {
        "y": "*bf16", "out": "*bf16", "position_N": "*i64", "offset_R": "*i64", "R": "i32", "N": "i32", "D": "i32",
    }, {"BLOCK_D": 1024}, {"num_warps": 4}  # fmt: skip
    for tiles in (False, True):
        yield f"swiglu{', tiles' if tiles else ''}", swiglu_kernel, {
            "gu": "*bf16", "weight": "*fp32", "h": "*bf16", "q": e4m3, "s": "*fp32", "N": "i32", "m": "i32",
            "floor": "fp32",
        }, {"WEIGHTED": True, "QUANTISE": tiles, "POWER_OF_TWO": False, "BLOCK_N": 32}, {"num_warps": 4}  # fmt: skip
        yield f"swiglu backward{', tiles' if tiles else ''}", swiglu_backward_kernel, {
            "gu": e4m3 if tiles else "*bf16", "gu_scale": "*fp32", "weight": "*fp32",
            "dh": "*fp32" if tiles else "*bf16", "dgu": "*bf16", "dweight": "*fp32", "again": e4m3,
            "again_scale": "*fp32", "N": "i32", "m": "i32", "floor": "fp32",
        }, {"WEIGHTED": True, "TILES": tiles, "POWER_OF_TWO": False, "BLOCK_N": 16}, {"num_warps": 4}  # fmt: skip
    types = {
        "logits": "*fp32", "bias": "*fp32", "scores": "*fp32", "choice": "*i64", "counts": "*i64", "T": "i32",
        "E": "i32", "K": "i32",
    }  # fmt: skip
    for name, groups, top_groups, group, v3 in (
        ("V3", 8, 4, 32, True),
        ("V2", 8, 3, 32, False),
        ("Lite", 1, 1, 64, False),
    ):
        yield f"router, {name}", router_kernel, types, {
            "GROUPS": groups, "TOP_GROUPS": top_groups, "SIGMOID": v3, "BIASED": v3, "SUM_OF_TWO": v3, "GROUP_2": group,
            "BLOCK_T": 4, "GROUPS_2": groups,
        }, {"num_warps": 4}  # fmt: skip
