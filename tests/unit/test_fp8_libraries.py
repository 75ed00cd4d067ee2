"""torch's scaled products and DeepGEMM, against stand-ins that take what their documentation says and nothing else."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is for machines without a GPU: see tests/gpu", allow_module_level=True)

import tests.support.interpreter  # noqa: F401
from moetrain.precision import Fp8, Groups, Reference
from moetrain.precision.libraries import DeepGemm, TorchScaled
from moetrain_kernels.quantise import ACTIVATIONS, GRADIENTS, Quantised

E4M3 = torch.float8_e4m3fn


def scaled_mm(a, b, a_scale, a_kind, b_scale, b_kind, *, output_dtype):
    """cuBLAS' layouts: a [M, K] row-major, b [K, N] column-major; scales of tiles with strides (1, M), of blocks
    [K4, N / 128], K4 being K / 128 rounded up to a multiple of 4, along which they lie.
    """
    kinds = torch.nn.functional.ScalingType
    (M, K), N = a.shape, b.shape[1]
    assert a.dtype == b.dtype == E4M3 and a.is_contiguous() and b.t().is_contiguous()
    assert K % 16 == 0 and N % 16 == 0 and a_kind == kinds.BlockWise1x128
    spans = -(-K // 128)
    assert (a_scale.shape == (M, spans) and a_scale.stride() == (1, M)) or spans == 1
    x = Quantised(a, a_scale, (1, 128)).dequantise()
    if b_kind == kinds.BlockWise1x128:
        assert b_scale.shape == (N, spans) and (b_scale.stride() == (1, N) or spans == 1)
        w = Quantised(b.t(), b_scale, (1, 128)).dequantise()
    else:
        assert b_kind == kinds.BlockWise128x128 and M % 4 == 0
        assert b_scale.shape == (-(-spans // 4) * 4, -(-N // 128)) and b_scale.stride(0) == 1
        w = Quantised(b.t(), b_scale.t()[:, :spans], (128, 128)).dequantise()
    return (x @ w.t()).to(output_dtype)


class StandIn:
    """DeepGEMM's NT products: scales of tiles for a, of blocks for b; rows in whole blocks of 128, -1 is padding."""

    def fp8_gemm_nt(self, a, b, d, *, disable_ue8m0_cast):
        assert disable_ue8m0_cast and d.dtype == torch.bfloat16
        assert all(t.is_contiguous() for t in (*a, *b, d))
        d.copy_(Quantised(*a, (1, 128)).dequantise() @ Quantised(*b, (128, 128)).dequantise().t())

    def m_grouped_fp8_gemm_nt_contiguous(self, a, b, d, m_indices, *, disable_ue8m0_cast):
        assert m_indices.dtype == torch.int32 and m_indices.shape[0] == a[0].shape[0] == d.shape[0]
        d.fill_(torch.nan)  # rows of padding hold anything
        for block in range(0, d.shape[0], 128):
            (e,) = set(m_indices[block : block + 128].tolist()) - {-1} or {-1}
            if e >= 0:
                rows = slice(block, block + 128)
                tile = a[0][rows], a[1][rows]
                self.fp8_gemm_nt(tile, (b[0][e], b[1][e]), d[rows], disable_ue8m0_cast=disable_ue8m0_cast)


def three_products(products, counts, parts):
    g = torch.Generator().manual_seed(9)
    E, N, outputs, inputs = len(counts), sum(counts), 256, 384
    groups = Groups(torch.tensor(counts), N)
    weight = products.weight(torch.randn(E, outputs, inputs, generator=g), parts, power_of_two=False)
    x, dy = torch.randn(N, inputs, generator=g), torch.randn(N, outputs, generator=g)
    tiles = products.tiles(x, power_of_two=False, floor=ACTIVATIONS)
    gradients = products.tiles(dy, power_of_two=False, floor=GRADIENTS)
    return (
        products.fprop(tiles, weight, groups, torch.float32),
        products.dgrad(gradients, weight, groups, torch.float32),
        products.wgrad(dy, tiles, groups, power_of_two=False),
    )


COUNTS = [[150], [130, 0, 3], [0, 0, 260], [0, 0]]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("library", ["torch", "deep_gemm"])
def test_the_three_products_are_the_references(monkeypatch, library, counts, parts):
    """1e-6: fp32 sums; DeepGEMM's outputs are rounded to bf16, 4e-3."""
    monkeypatch.setattr(torch.nn.functional, "scaled_mm", scaled_mm)
    products = TorchScaled() if library == "torch" else DeepGemm(StandIn(), blackwell=False)
    mine, want = three_products(products, counts, parts), three_products(Reference(), counts, parts)
    for a, b, bound in zip(mine, want, (1e-6, 1e-6, 1e-6) if library == "torch" else (4e-3, 4e-3, 1e-6), strict=True):
        assert a.shape == b.shape
        assert float((a.double() - b.double()).norm()) <= bound * float(b.double().norm())
    assert not mine[2][[count == 0 for count in counts]].any(), "experts without a token"


@pytest.mark.parametrize("products", [TorchScaled, lambda: DeepGemm(StandIn(), blackwell=False)])
def test_sizes_that_they_do_not_take_are_refused(products):
    with pytest.raises(ValueError, match="sizes that 128 does not divide: use fp8"):
        Fp8(products()).linear(torch.ones(4, 200), torch.ones(128, 200))
