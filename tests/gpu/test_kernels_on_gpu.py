"""What only a GPU can say of the Triton kernels: the numbers of the compiled ones, at the sizes of real layers."""

from __future__ import annotations

import pytest
import torch

from moetrain.model.dispatch import LocalDispatcher
from moetrain.precision import Fp8, Reference, products_for
from moetrain_kernels import quantise

pytestmark = pytest.mark.gpu
#: rows of each of 8 experts: unaligned, starved, one with most
COUNTS = [300, 0, 1, 4097, 128, 0, 77, 513]


@pytest.fixture(scope="module")
def kernels():
    pytest.importorskip("triton")
    from moetrain_kernels import triton_grouped, triton_moe, triton_quantise

    return triton_quantise, triton_grouped, triton_moe


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to("cuda", dtype)


def close(got, want, bound):
    assert got.shape == want.shape
    assert float((got.double() - want.double()).norm()) <= bound * float(want.double().norm())


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 1e-38, 1e30])
def test_quantisers_are_the_reference_bit_for_bit(kernels, power_of_two, dtype, size):
    x = randn(1000, 7168, dtype=dtype) * size
    x[3, 5], x[7, 300] = torch.inf, torch.nan
    for floor in (quantise.ACTIVATIONS, quantise.GRADIENTS):
        got = kernels[0].tiles(x, power_of_two=power_of_two, floor=floor)
        want = quantise.tiles(x, power_of_two=power_of_two, floor=floor)
        assert torch.equal(got.scale.nan_to_num(), want.scale.nan_to_num())
        assert torch.equal(got.values.float().nan_to_num(), want.values.float().nan_to_num())
    w = randn(3, 1408, 576, dtype=dtype)
    values, transposed, scale = kernels[0].blocks(w, 2, power_of_two)
    for e in range(3):
        for p, part in enumerate(w[e].chunk(2)):
            want = quantise.blocks(part, power_of_two=power_of_two)
            rows, high = slice(704 * p, 704 * (p + 1)), scale.shape[1] // 2
            assert torch.equal(values[e, rows].float(), want.values.float())
            assert torch.equal(transposed[e, :, rows].float().t(), want.values.float())
            assert torch.equal(scale[e, high * p : high * (p + 1)], want.scale)


@pytest.mark.parametrize(
    ("outputs", "inputs", "parts"), [(4096, 7168, 2), (7168, 2048, 1), (576, 7168, 1), (2816, 2048, 2)]
)
def test_fp8_products_of_experts(outputs, inputs, parts):
    """1e-5 against the same operands in fp32 on the GPU: sums of up to 7168 in another order."""
    torch.backends.cuda.matmul.allow_tf32 = False
    fast, exact = products_for("triton", torch.device("cuda")), Reference()
    from moetrain.precision import Groups

    groups = Groups(torch.tensor(COUNTS, device="cuda"), sum(COUNTS))
    w = randn(len(COUNTS), outputs, inputs, seed=1)
    x, dy = randn(sum(COUNTS), inputs, seed=2), randn(sum(COUNTS), outputs, seed=3) * 1e-7
    found = []
    for products in (fast, exact):
        q = products.tiles(x, power_of_two=False, floor=quantise.ACTIVATIONS)
        g = products.tiles(dy, power_of_two=False, floor=quantise.GRADIENTS)
        weight = products.weight(w, parts, power_of_two=False)
        found.append(
            [
                products.fprop(q, weight, groups, torch.float32),
                products.dgrad(g, weight, groups, torch.float32),
                products.wgrad(dy, q, groups, power_of_two=False),
            ]
        )
    for got, want in zip(*found, strict=True):
        close(got, want, 1e-5)
    assert not found[0][2][1].any() and not found[0][2][5].any()


def test_grouped_products_in_bf16(kernels):
    """4e-3: one rounding to bf16."""
    a, b = randn(sum(COUNTS), 2048, dtype=torch.bfloat16), randn(len(COUNTS), 1408, 2048, seed=1, dtype=torch.bfloat16)
    dy = randn(sum(COUNTS), 1408, seed=2, dtype=torch.bfloat16)
    a.requires_grad_(), b.requires_grad_()
    y = kernels[1].grouped_product(a, b, torch.tensor(COUNTS, device="cuda"))
    got = [y.detach(), *torch.autograd.grad(y, (a, b), dy)]
    a64, b64 = a.detach().double().requires_grad_(), b.detach().double().requires_grad_()
    want = torch.cat([x @ w.T for x, w in zip(a64.split(COUNTS), b64, strict=True)])
    for mine, exact in zip(got, [want.detach(), *torch.autograd.grad(want, (a64, b64), dy.double())], strict=True):
        close(mine, exact, 4e-3)


def test_the_routers_choice(kernels):
    logits, bias = randn(4096, 256), randn(256, seed=1) * 0.1
    scores, choice, counts = kernels[2].route(logits, bias, 8, 8, 4, True, True)
    biased = logits.sigmoid() + bias
    best = biased.unflatten(1, (8, -1)).topk(2, dim=-1).values.sum(-1).topk(4, dim=-1).indices
    shut = torch.ones(4096, 8, dtype=torch.bool, device="cuda").scatter_(1, best, False).repeat_interleave(32, dim=1)
    want = biased.masked_fill(shut, -torch.inf).topk(8, dim=-1).indices
    assert (
        float((choice.sort(dim=1).values == want.sort(dim=1).values).double().mean()) > 0.9999
    )  # sigmoids differ by ulps
    assert torch.equal(counts, torch.bincount(choice.flatten(), minlength=256))
    close(scores, logits.double().sigmoid(), 1e-6)


@pytest.mark.parametrize("sigmoid", [True, False])
def test_scores_that_are_no_numbers_still_choose_experts_that_exist(kernels, sigmoid):
    """Or reading beyond the weights ends a run that only had to drop a window. 10 of 16 lanes are experts."""
    logits = torch.full((64, 40), torch.nan, device="cuda")
    logits[32:, 7:] = 0.0
    _, choice, _ = kernels[2].route(logits, None, 3, 4, 2, sigmoid, sigmoid)
    assert int(choice.min()) >= 0 and int(choice.max()) < 40


def test_a_layer_of_experts_in_triton_is_the_reference():
    """2e-2: an operand near a tie of E4M3 falls to the other side here and there."""
    g = torch.Generator().manual_seed(4)
    T, E, D, m = 512, 16, 1024, 512
    x, weight = randn(T, D), torch.rand(T, 4, generator=g).cuda()
    up, down = randn(E, 2 * m, D, seed=1) / 32, randn(E, D, m, seed=2) / 22
    choice = torch.stack([torch.randperm(E - 1, generator=g)[:4] for _ in range(T)]).cuda()
    found = []
    for products in (products_for("auto", torch.device("cuda")), Reference()):
        leaves = [t.clone().requires_grad_() for t in (x, up, down, weight)]
        a, b, c, w = leaves
        y = Fp8(products).experts(LocalDispatcher(E).send(a, choice, w), b, c)
        found.append([y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))])
    for got, want in zip(*found, strict=True):
        close(got, want, 2e-2)
    assert not found[0][2][-1].any()
