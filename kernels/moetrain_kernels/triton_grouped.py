"""Grouped matrix products in Triton: rows sorted by expert, each with its expert's matrix, in FP8 and in bf16.

``product_kernel`` is Fprop and Dgrad, ``weight_kernel`` is Wgrad. FP8 sums stay in the tensor core for one scale's span
(at most 128) and are then scaled and added in fp32, as V3 does against Hopper's short accumulators (paper 3.3.2). Both
operands of FP8 are read along the sum, the only way Hopper's FP8 instructions take them. No count is read on the host:
the grid covers as many tiles as there could be, and programs go from tile to tile (persistent).

Legend: N rows sorted by expert, E experts, J outputs, K what is summed over, B blocks of rows of one expert.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moetrain_kernels.triton_quantise import Blocks, Columns

#: compute capability (major) -> sizes. Chosen by registers, shared memory and spills of the compiled kernels
#: (``moetrain_kernels.aot``); not tuned on a GPU yet.
CONFIGS: dict[int, dict[str, dict[str, int]]] = {
    major: {
        "fp8": {"BLOCK_N": 128, "BLOCK_J": 128, "num_warps": 8, "num_stages": 4},
        "fp8, ragged": {"BLOCK_N": 128, "BLOCK_J": 64, "num_warps": 8, "num_stages": 4},
        "fp8, weights": {"BLOCK_N": 128, "BLOCK_J": 128, "num_warps": 8, "num_stages": 4},
        "bf16": {"BLOCK_N": 128, "BLOCK_J": 128, "num_warps": 8, "num_stages": 4},
        "bf16, ragged": {"BLOCK_N": 128, "BLOCK_J": 128, "num_warps": 8, "num_stages": 4},
        "bf16, weights": {"BLOCK_N": 128, "BLOCK_J": 128, "num_warps": 8, "num_stages": 4},
    }
    for major in (9, 10)
}
FALLBACK = {"BLOCK_N": 64, "BLOCK_J": 64, "num_warps": 4, "num_stages": 2}  # other CUDA devices


@triton.jit
def product_kernel(
    a, b, c, a_scale, b_scale, expert_B, row_B, end_B, many, J, K,
    stride_be, stride_bj, stride_bk, stride_se, stride_sj, stride_sk, part_j, part_k,
    SCALED: tl.constexpr, EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """c[n, j] = sum over k of a[n, k] b[e, j, k]. Scales of b are for 128 x 128, starting anew at each part.

    EVEN: BLOCK_K divides K, and the columns of a tile have one scale.
    """
    wide = tl.cdiv(J, BLOCK_J)
    for tile in range(tl.program_id(0), many * wide, tl.num_programs(0)):
        block = tile // wide
        e = tl.load(expert_B + block).to(tl.int64)
        row, end = tl.load(row_B + block), tl.load(end_B + block)
        rows = (row + tl.arange(0, BLOCK_N)).to(tl.int64)
        js = (tile % wide) * BLOCK_J + tl.arange(0, BLOCK_J)
        ks = tl.arange(0, BLOCK_K)
        in_rows, in_js = rows < end, js < J
        a_at = a + rows[:, None] * K + ks[None, :]
        b_at = b + e * stride_be + js.to(tl.int64)[None, :] * stride_bj + ks.to(tl.int64)[:, None] * stride_bk
        scaled_js = (tile % wide) * BLOCK_J if EVEN else js
        block_j = (scaled_js // part_j) * tl.cdiv(part_j, 128) + (scaled_js % part_j) // 128
        b_scale_at = b_scale + e * stride_se + block_j * stride_sj
        acc = tl.zeros((BLOCK_N, BLOCK_J), dtype=tl.float32)
        for k in range(0, tl.where(row < end, K, 0), BLOCK_K):
            if EVEN:
                av = tl.load(a_at, mask=in_rows[:, None], other=0.0)
                bv = tl.load(b_at, mask=in_js[None, :], other=0.0)
            else:
                in_k = ks < K - k
                av = tl.load(a_at, mask=in_rows[:, None] & in_k[None, :], other=0.0)
                bv = tl.load(b_at, mask=in_k[:, None] & in_js[None, :], other=0.0)
            if SCALED:
                sa = tl.load(a_scale + rows * tl.cdiv(K, 128) + k // 128, mask=in_rows, other=0.0)
                block_k = (k // part_k) * tl.cdiv(part_k, 128) + (k % part_k) // 128
                if EVEN:
                    acc += tl.dot(av, bv) * (sa * tl.load(b_scale_at + block_k * stride_sk))[:, None]
                else:
                    sb = tl.load(b_scale_at + block_k * stride_sk, mask=in_js, other=0.0)
                    acc += tl.dot(av, bv) * (sa[:, None] * sb[None, :])
            else:
                acc = tl.dot(av, bv, acc)
            a_at += BLOCK_K
            b_at += BLOCK_K * stride_bk
        tl.store(
            c + rows[:, None] * J + js[None, :], acc.to(c.dtype.element_ty), mask=in_rows[:, None] & in_js[None, :]
        )


@triton.jit
def weight_kernel(
    a, b, c, a_scale, b_scale, start_E, count_E, E, I, J,
    stride_ai, stride_ak, stride_bj, stride_bk,
    SCALED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """c[e, i, j] = sum over the group's k of a[i, k] b[j, k]. SCALED: k in padded blocks of 128 with scales [B, I]."""
    high, wide = tl.cdiv(I, BLOCK_N), tl.cdiv(J, BLOCK_J)
    for tile in range(tl.program_id(0), E * high * wide, tl.num_programs(0)):
        e = tile // (high * wide)
        rest = tile % (high * wide)
        start, count = tl.load(start_E + e), tl.load(count_E + e)
        if SCALED:
            start, count = start * 128, count * 128  # said here, so that the compiler knows addresses to be aligned
        rows = (rest // wide) * BLOCK_N + tl.arange(0, BLOCK_N)
        js = (rest % wide) * BLOCK_J + tl.arange(0, BLOCK_J)
        ks = tl.arange(0, BLOCK_K)
        in_rows, in_js = rows < I, js < J
        first = (start + ks).to(tl.int64)
        a_at = a + rows.to(tl.int64)[:, None] * stride_ai + first[None, :] * stride_ak
        b_at = b + js.to(tl.int64)[None, :] * stride_bj + first[:, None] * stride_bk
        acc = tl.zeros((BLOCK_N, BLOCK_J), dtype=tl.float32)
        for k in range(0, count, BLOCK_K):
            if SCALED:
                av = tl.load(a_at, mask=in_rows[:, None], other=0.0)
                bv = tl.load(b_at, mask=in_js[None, :], other=0.0)
                block = (start + k) // 128
                sa = tl.load(a_scale + block * I + rows, mask=in_rows, other=0.0)
                sb = tl.load(b_scale + block * J + js, mask=in_js, other=0.0)
                acc += tl.dot(av, bv) * (sa[:, None] * sb[None, :])
            else:
                in_k = ks < count - k
                av = tl.load(a_at, mask=in_rows[:, None] & in_k[None, :], other=0.0)
                bv = tl.load(b_at, mask=in_k[:, None] & in_js[None, :], other=0.0)
                acc = tl.dot(av, bv, acc)
            a_at += BLOCK_K * stride_ak
            b_at += BLOCK_K * stride_bk
        at = c + (e.to(tl.int64) * I + rows)[:, None] * J + js[None, :]
        tl.store(at, acc.to(c.dtype.element_ty), mask=in_rows[:, None] & in_js[None, :])


def sizes(device: torch.device, kind: str) -> dict[str, int]:
    """Of the kernels on a device; small ones where there is none (the interpreter)."""
    if device.type != "cuda":
        return {"BLOCK_N": 32, "BLOCK_J": 32, "num_warps": 4, "num_stages": 1}
    return CONFIGS.get(torch.cuda.get_device_capability(device)[0], {}).get(kind, FALLBACK)


def _programs(device: torch.device, tiles: int) -> int:
    many = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return max(1, min(tiles, many))


def span(part: int, whole: int) -> int:
    """How much is summed between scalings: the most of 128, 64, 32 that never crosses two parts' scales."""
    for size in (128, 64, 32):
        if part == whole or part % size == 0:
            return size
    raise ValueError(f"gate and up rows ({part}) must be a multiple of 32 for FP8 kernels: use fp8.products=reference")


@torch.library.custom_op("moetrain::grouped_fp8", mutates_args=())
def grouped_fp8(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, counts_E: Tensor, parts: int, transposed: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """Rows a [N, K] in tiles with matrices b [E, J, K] in blocks -> [N, J].

    ``b_scale`` is that of the weight as it lies (``moetrain_kernels.triton_quantise.blocks``); with ``transposed`` b is
    the weight transposed, and what its rows were is summed over.
    """
    N, K = a.shape
    J = b.shape[1]
    c = torch.empty(N, J, dtype=dtype, device=a.device)
    stride_se, rows, columns = b_scale.stride()
    part_j, part_k = (J, K // parts) if transposed else (J // parts, K)
    step = span(part_k, K)
    even = K % step == 0 and (part_j == J or part_j % 128 == 0)
    how = sizes(a.device, "fp8" if even else "fp8, ragged")
    tiles = Blocks.of(counts_E, N, how["BLOCK_N"])
    many = tiles.row_B.shape[0]
    if many:
        product_kernel[(_programs(a.device, many * triton.cdiv(J, how["BLOCK_J"])),)](
            a, b, c, a_scale, b_scale, tiles.expert_B, tiles.row_B, tiles.end_B, many, J, K,
            b.stride(0), b.stride(1), b.stride(2), stride_se, *((columns, rows) if transposed else (rows, columns)),
            part_j, part_k, SCALED=True, EVEN=even, BLOCK_K=step, **how,
        )  # fmt: skip
    return c


@grouped_fp8.register_fake
def _(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, counts_E: Tensor, parts: int, transposed: bool,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


@torch.library.custom_op("moetrain::grouped_fp8_weight", mutates_args=())
def _fp8_weight(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, first_E: Tensor, count_E: Tensor) -> Tensor:
    E, I, J = count_E.shape[0], a.shape[0], b.shape[0]
    c = torch.empty(E, I, J, dtype=torch.float32, device=a.device)
    how = sizes(a.device, "fp8, weights")
    grid = _programs(a.device, E * triton.cdiv(I, how["BLOCK_N"]) * triton.cdiv(J, how["BLOCK_J"]))
    weight_kernel[(grid,)](
        a, b, c, a_scale, b_scale, first_E, count_E, E, I, J, a.stride(0), 1, b.stride(0), 1,
        SCALED=True, BLOCK_K=128, **how,
    )  # fmt: skip
    return c


@_fp8_weight.register_fake
def _(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, first_E: Tensor, count_E: Tensor) -> Tensor:
    return a.new_empty(count_E.shape[0], a.shape[0], b.shape[0], dtype=torch.float32)


def grouped_fp8_weight(dy: Columns, x: Columns, rows: Blocks) -> Tensor:
    """``dy^T x`` of each group: fp32 [E, O, I], zeros for a group without rows."""
    return _fp8_weight(dy.values, dy.scale, x.values, x.scale, rows.first_E, rows.count_E)


def _product(a: Tensor, b: Tensor, tiles: Blocks, how: dict[str, Any]) -> Tensor:
    """a [N, K], b [E, J, K] with any strides -> [N, J]."""
    c = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    many, J, K = tiles.row_B.shape[0], b.shape[1], a.shape[1]
    if many:
        product_kernel[(_programs(a.device, many * triton.cdiv(J, how["BLOCK_J"])),)](
            a, b, c, a, b, tiles.expert_B, tiles.row_B, tiles.end_B, many, J, K, *b.stride(), 0, 0, 0, J, K,
            SCALED=False, EVEN=K % 64 == 0, BLOCK_K=64, **how,
        )  # fmt: skip
    return c


@torch.library.custom_op("moetrain::grouped_product", mutates_args=())
def grouped_product(a: Tensor, b: Tensor, counts_E: Tensor) -> Tensor:
    """Rows a [N, K] with matrices b [E, J, K] -> [N, J], in a's dtype with fp32 sums. Differentiable."""
    how = sizes(a.device, "bf16" if a.shape[1] % 64 == 0 else "bf16, ragged")
    return _product(a.contiguous(), b, Blocks.of(counts_E, a.shape[0], how["BLOCK_N"]), how)


@grouped_product.register_fake
def _(a: Tensor, b: Tensor, counts_E: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


@torch.library.custom_op("moetrain::grouped_product_weight", mutates_args=())
def grouped_product_weight(dy: Tensor, x: Tensor, counts_E: Tensor) -> Tensor:
    """``dy^T x`` of each group: [E, J, K], in x's dtype with fp32 sums; zeros for a group without rows."""
    E, I, J = counts_E.shape[0], dy.shape[1], x.shape[1]
    c = torch.empty(E, I, J, dtype=x.dtype, device=x.device)
    how = sizes(x.device, "bf16, weights")
    dy, x = dy.contiguous(), x.contiguous()
    start_E = (counts_E.cumsum(0) - counts_E).to(torch.int32)
    grid = _programs(x.device, E * triton.cdiv(I, how["BLOCK_N"]) * triton.cdiv(J, how["BLOCK_J"]))
    weight_kernel[(grid,)](
        dy, x, c, dy, x, start_E, counts_E.to(torch.int32), E, I, J, 1, dy.stride(0), 1, x.stride(0),
        SCALED=False, BLOCK_K=64, **how,
    )  # fmt: skip
    return c


@grouped_product_weight.register_fake
def _(dy: Tensor, x: Tensor, counts_E: Tensor) -> Tensor:
    return x.new_empty(counts_E.shape[0], dy.shape[1], x.shape[1])


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    a, b, counts_E = ctx.saved_tensors
    da = grouped_product(dy, b.transpose(1, 2), counts_E) if ctx.needs_input_grad[0] else None
    db = grouped_product_weight(dy, a, counts_E) if ctx.needs_input_grad[1] else None
    return da, db, None


grouped_product.register_autograd(_gradients, setup_context=_keep)
