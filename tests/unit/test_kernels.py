"""Every Triton kernel in the interpreter: quantisers bit for bit, products and gradients against float64."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the interpreter is for machines without a GPU: see tests/gpu", allow_module_level=True)

import tests.support.interpreter  # noqa: F401  before the kernels
from moetrain.errors import UserError
from moetrain.model import backends
from moetrain.model.dispatch import LocalDispatcher
from moetrain.model.gate import GATES, route_by_torch
from moetrain.parallel.recompute import recompute_in_backward
from moetrain.precision import Fp8, Reference, Triton, products_for
from moetrain_kernels import quantise, triton_grouped, triton_moe, triton_quantise
from moetrain_kernels.quantise import GRADIENTS, Quantised
from moetrain_kernels.triton_quantise import Blocks
from tests.support.small import FAMILIES, difference, every_loss, model, rank_window, same_report, sgd, state

COUNTS = [[5, 0, 37, 130], [0, 0, 64, 0], [172, 0, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0]]


def samples(kind, *shape):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=g)
    return {
        "normal": x,
        "wide": x * torch.exp(8 * torch.randn(*shape, generator=g)),
        "tiny": x * 1e-38,
        "zeros": 0 * x,
        "on ties": torch.randint(-64, 64, shape, generator=g) / 16.0 * 2.0 ** torch.randint(-6, 5, shape, generator=g),
        "not finite": torch.where(torch.rand(*shape, generator=g) < 0.01, torch.inf, x),
        "not a number": torch.where(torch.rand(*shape, generator=g) < 0.01, torch.nan, x),
        "bf16": x.bfloat16(),
    }[kind]


KINDS = ["normal", "wide", "tiny", "zeros", "on ties", "not finite", "not a number", "bf16"]


def same(got: Quantised, want: Quantised):
    assert torch.equal(got.scale, want.scale) or torch.equal(got.scale.isnan(), want.scale.isnan())
    a, b = got.values.float(), want.values.float()
    assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_are_the_reference_bit_for_bit(kind, power_of_two):
    for floor in (quantise.ACTIVATIONS, GRADIENTS):
        x = samples(kind, 37, 300)
        same(
            triton_quantise.tiles(x, power_of_two=power_of_two, floor=floor),
            quantise.tiles(x, power_of_two=power_of_two, floor=floor),
        )


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts", [1, 2])
def test_blocks_are_the_reference_bit_for_bit(kind, power_of_two, parts):
    w = samples(kind, 2, 300, 200)
    values, transposed, scale = triton_quantise.blocks(w, parts, power_of_two)
    for e in range(2):
        high = scale.shape[1] // parts
        for p, part in enumerate(w[e].chunk(parts)):
            want = quantise.blocks(part, power_of_two=power_of_two)
            rows, scales = slice(p * 300 // parts, (p + 1) * 300 // parts), scale[e, p * high : (p + 1) * high]
            same(Quantised(values[e, rows], scales, want.tile), want)
            same(Quantised(transposed[e, :, rows].t(), scales, want.tile), want)


def columns_by_group(x, counts, power_of_two, floor):
    """The reference, group by group, padded to whole blocks and transposed."""
    values, scales = [], []
    for part in x.split(counts):
        if part.shape[0]:
            q = quantise.columns(part, power_of_two=power_of_two, floor=floor)
            values.append(torch.nn.functional.pad(q.values.float(), (0, 0, 0, -part.shape[0] % 128)))
            scales.append(q.scale)
    return torch.cat(values).t() if values else x.t()[:, :0], torch.cat(scales) if scales else x[:0]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("of_tiles", [False, True])
def test_columns_are_the_reference_bit_for_bit_in_each_group(counts, of_tiles):
    x = samples("wide", sum(counts), 150)
    given = quantise.tiles(x) if of_tiles else x
    rows = Blocks.of(torch.tensor(counts), sum(counts))
    got = triton_quantise.columns(given, rows, floor=GRADIENTS)
    want, scale = columns_by_group(given.dequantise() if of_tiles else x, counts, False, GRADIENTS)
    used = want.shape[1]
    assert torch.equal(got.values.float()[:, :used], want) and torch.equal(got.scale[: used // 128], scale)
    assert not got.values.float()[:, used:].any(), "padding is zeros"


@pytest.mark.parametrize("counts", COUNTS)
def test_blocks_of_rows_cover_every_row_once(counts):
    rows = Blocks.of(torch.tensor(counts), sum(counts), 32)
    seen = []
    for e, row, end in zip(rows.expert_B.tolist(), rows.row_B.tolist(), rows.end_B.tolist(), strict=True):
        first = sum(counts[:e])
        assert row >= end or first <= row < end == first + counts[e]
        seen += range(row, min(row + 32, end))
    assert seen == list(range(sum(counts)))


def close(got, want, bound):
    assert got.shape == want.shape
    assert float((got.double() - want).norm()) <= bound * float(want.norm())


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("parts", "outputs", "inputs"), [(1, 136, 200), (2, 192, 130), (2, 256, 136)])
def test_fp8_products_are_those_of_the_same_operands_in_float64(counts, parts, outputs, inputs):
    """1e-6: fp32 sums."""
    E, N = len(counts), sum(counts)
    g = torch.Generator().manual_seed(1)
    w = torch.randn(E, outputs, inputs, generator=g)
    values, transposed, scale = triton_quantise.blocks(w, parts, False)
    exact = torch.stack([torch.cat([quantise.blocks(p).dequantise(torch.float64) for p in m.chunk(parts)]) for m in w])
    x, dy = quantise.tiles(torch.randn(N, inputs, generator=g)), quantise.tiles(torch.randn(N, outputs, generator=g))
    product, counts_E = triton_grouped.grouped_fp8, torch.tensor(counts)
    y = product(x.values, x.scale, values, scale, counts_E, parts, False, torch.float32)
    dx = product(dy.values, dy.scale, transposed, scale, counts_E, parts, True, torch.float32)
    xs, dys = x.dequantise(torch.float64).split(counts), dy.dequantise(torch.float64).split(counts)
    close(y, torch.cat([a @ m.T for a, m in zip(xs, exact, strict=True)]), 1e-6)
    close(dx, torch.cat([a @ m for a, m in zip(dys, exact, strict=True)]), 1e-6)


@pytest.mark.parametrize("counts", COUNTS)
def test_fp8_weight_gradients_are_those_of_the_same_columns_in_float64(counts):
    g = torch.Generator().manual_seed(2)
    dy, x = torch.randn(sum(counts), 70, generator=g), torch.randn(sum(counts), 150, generator=g)
    rows = Blocks.of(torch.tensor(counts), sum(counts))
    dw = triton_grouped.grouped_fp8_weight(
        triton_quantise.columns(dy, rows, floor=GRADIENTS), triton_quantise.columns(quantise.tiles(x), rows), rows
    )
    assert dw.dtype == torch.float32 and dw.shape == (4, 70, 150)
    for got, a, b in zip(dw, dy.split(counts), x.split(counts), strict=True):
        want = torch.zeros(70, 150, dtype=torch.float64)
        if a.shape[0]:
            a, b = quantise.columns(a, floor=GRADIENTS), quantise.columns(quantise.tiles(b).dequantise())
            want = a.dequantise(torch.float64).T @ b.dequantise(torch.float64)
        close(got, want, 1e-6)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_grouped_products_and_their_gradients(counts, dtype, bound):
    """4e-3: results are rounded to bf16, 2^-8 each; their sums are fp32's."""
    g = torch.Generator().manual_seed(3)
    a, b = torch.randn(sum(counts), 72, generator=g).to(dtype), torch.randn(4, 48, 72, generator=g).to(dtype)
    dy = torch.randn(sum(counts), 48, generator=g).to(dtype)
    a.requires_grad_(), b.requires_grad_()
    y = triton_grouped.grouped_product(a, b, torch.tensor(counts))
    got = [y, *torch.autograd.grad(y, (a, b), dy)]
    a64, b64 = a.detach().double().requires_grad_(), b.detach().double().requires_grad_()
    y64 = torch.cat([rows @ m.T for rows, m in zip(a64.split(counts), b64, strict=True)])
    for mine, want in zip(got, [y64, *torch.autograd.grad(y64, (a64, b64), dy.double())], strict=True):
        assert mine.dtype == dtype
        close(mine.detach(), want.detach(), bound)


def routes(rows, experts, top_k, seed=0):
    """As a dispatcher makes them, in the shape that ``gather_rows`` takes."""
    g = torch.Generator().manual_seed(seed)
    choice = torch.stack([torch.randperm(experts, generator=g)[:top_k] for _ in range(rows)])
    routed = LocalDispatcher(experts).send(torch.zeros(rows, 1), choice, torch.rand(rows, top_k, generator=g))
    return routed.row_N, routed.position_N, routed.offset_R


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_go_to_their_entries_and_back(dtype):
    where = routes(21, 6, 3)
    row_N = where[0]
    g = torch.Generator().manual_seed(5)
    x, y = torch.randn(21, 70, generator=g).to(dtype), torch.randn(63, 70, generator=g).to(dtype)
    x.requires_grad_(), y.requires_grad_()
    gathered, summed = triton_moe.gather_rows(x, *where), triton_moe.sum_rows(y, *where)
    assert torch.equal(gathered, x[row_N])
    want = torch.zeros(21, 70, dtype=torch.float64).index_add_(0, row_N, y.detach().double())
    bound = 1e-6 if dtype == torch.float32 else 4e-3  # one rounding to bf16
    close(summed.detach(), want, bound)
    (dx,) = torch.autograd.grad(gathered, x, y.detach())
    (dy,) = torch.autograd.grad(summed, y, x.detach())
    close(dx, want, bound)
    assert torch.equal(dy, x.detach()[row_N])


def test_a_row_without_an_entry_is_zero():
    """Of expert parallelism with unequal rows: the second of three has none."""
    y = torch.ones(3, 5)
    out = triton_moe.sum_rows(y, torch.tensor([0, 2, 2]), torch.tensor([0, 1, 2]), torch.tensor([0, 2, 2]))
    assert out[:, 0].tolist() == [2.0, 0.0, 1.0]


def swiglu_in_float64(gu, weight, dh):
    gu, weight = gu.double().requires_grad_(), weight.double().requires_grad_()
    gate, up = gu.chunk(2, dim=1)
    h = torch.nn.functional.silu(gate) * up * weight.unsqueeze(1)
    return h.detach(), *torch.autograd.grad(h, (gu, weight), dh.double())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
@pytest.mark.parametrize("m", [72, 128, 200])
def test_swiglu_and_its_gradients(dtype, bound, m):
    g = torch.Generator().manual_seed(6)
    gu, dh = torch.randn(37, 2 * m, generator=g).to(dtype), torch.randn(37, m, generator=g).to(dtype)
    weight = torch.rand(37, generator=g)
    gu.requires_grad_(), weight.requires_grad_()
    h = triton_moe.swiglu(gu, weight)
    got = [h.detach(), *torch.autograd.grad(h, (gu, weight), dh)]
    for mine, want in zip(got, swiglu_in_float64(gu.detach(), weight.detach(), dh), strict=True):
        close(mine, want, bound)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("m", [72, 128, 200])
def test_swiglu_in_tiles(weighted, m):
    """Forward from fp32, backward from tiles of the input, the output again the tiles of what those tiles give.

    1e-2: where fp32 and float64 fall to different sides of a tie, a value moves by a step of E4M3; seen: 2e-3.
    """
    g = torch.Generator().manual_seed(7)
    gu, dh, weight = torch.randn(37, 2 * m, generator=g), torch.randn(37, m, generator=g), torch.rand(37, generator=g)
    w = weight if weighted else torch.ones(37)
    given = weight if weighted else None
    h, *_ = swiglu_in_float64(gu, w, dh)
    close(triton_moe.swiglu_tiles(gu, given).dequantise(), quantise.tiles(h.float()).dequantise(torch.float64), 1e-2)
    waited = quantise.tiles(gu)
    h, dgu, dweight = swiglu_in_float64(waited.dequantise(), w, dh)
    got = triton_moe.swiglu_backward_tiles(waited, given, dh, dtype=torch.float32)
    close(got.dgu, dgu, 1e-6)
    close(got.again.dequantise(), quantise.tiles(h.float()).dequantise(torch.float64), 1e-2)
    if weighted:
        close(got.dweight, dweight, 1e-6)
    else:
        assert got.dweight is None


@pytest.mark.parametrize("family", ["V3", "V2", "V2-Lite"])
def test_the_router_chooses_as_the_gates_do(family):
    """Scores to fp32, the choice as sets, and the histogram; 20 experts a group make lanes that no expert has."""
    config = FAMILIES[family].model_copy(
        update={"n_routed_experts": 40, "num_experts_per_tok": 3}
        | ({"n_group": 4, "topk_group": 2} if family != "V2-Lite" else {})
    )
    gate = GATES[config.topk_method](config)
    g = torch.Generator().manual_seed(8)
    x = torch.randn(29, config.hidden_size, generator=g)
    torch.nn.init.normal_(gate.weight, std=0.5, generator=g)
    bias = None
    if family == "V3":
        bias = gate.e_score_correction_bias.copy_(torch.randn(40, generator=g))
    logits = (x @ gate.weight.detach().t()).requires_grad_()
    scores, choice, counts = triton_moe.route(
        logits, bias, 3, config.n_group, config.topk_group, gate.sigmoid, family == "V3"
    )
    want = gate.score(logits.detach().double().requires_grad_())
    close(scores.detach(), want.detach(), 1e-6)
    chosen = gate.choose(gate.score(logits.detach()))
    assert torch.equal(choice.sort(dim=1).values, chosen.sort(dim=1).values)
    assert torch.equal(counts, torch.bincount(chosen.flatten(), minlength=40))
    best = scores.detach() + (bias if bias is not None else 0)
    assert bool((best.gather(1, choice).diff(dim=1) <= 0).all()), "best first"
    dscores = torch.randn(29, 40, generator=g)
    (dx,) = torch.autograd.grad(scores, logits, dscores)
    exact = logits.detach().double().requires_grad_()
    close(dx, torch.autograd.grad(gate.score(exact), exact, dscores.double())[0], 1e-6)


@pytest.mark.parametrize("family", ["V3", "V2", "V2-Lite"])
def test_a_step_routed_by_the_kernel_is_the_step(family):
    """Losses, norm, counts, bias and parameters of two windows in fp32, with every balance loss, recomputed and
    replayed. 1e-6: scores of one pass against those of several."""
    config, found = FAMILIES[family], []
    for route in (route_by_torch, backends.triton_route):
        m = model(config, dtype=torch.float32)
        m.use_backend(backends.REFERENCE._replace(route=route))
        for block in m.layers:
            recompute_in_backward(block)
        accumulator = sgd(m, config, every_loss(config, "window"))
        found.append(([accumulator.step(rank_window(0, 1)) for _ in range(2)], state(m)))
    (got, got_state), (want, want_state) = found
    for a, b in zip(got, want, strict=True):
        same_report(a, b, 1e-6)
    assert difference(got_state, want_state) < 1e-6


def test_equal_scores_go_to_the_lower_expert():
    _, choice, _ = triton_moe.route(torch.zeros(2, 8), None, 3, 4, 2, True, True)
    assert choice.tolist() == [[0, 1, 2]] * 2


def test_operators_say_the_shapes_of_their_results():
    """For torch.compile and dry runs: each operator's fake against the real thing."""
    counts, x = torch.tensor([3, 0, 5, 0]), torch.randn(8, 64)
    w, where = torch.randn(4, 64, 64), routes(4, 4, 2)
    weight, gu = torch.rand(8), torch.randn(8, 128)
    q, _, s = triton_quantise.blocks(w, 2, False)
    t = quantise.tiles(x)
    rows = Blocks.of(counts, 8)
    columns = triton_quantise.columns(x, rows)
    checks = [
        (torch.ops.moetrain.quantise_tiles, (x, False, 1e-4)),
        (torch.ops.moetrain.quantise_blocks, (w, 2, False)),
        (torch.ops.moetrain.quantise_columns, (x, None, rows.row_B, rows.end_B, False, 1e-4)),
        (torch.ops.moetrain.grouped_fp8, (t.values, t.scale, q, s, counts, 2, False, torch.float32)),
        (torch.ops.moetrain.grouped_fp8_weight, (*columns, *columns, rows.first_E, rows.count_E)),
        (torch.ops.moetrain.grouped_product, (x, w, counts)),
        (torch.ops.moetrain.grouped_product_weight, (x, x, counts)),
        (torch.ops.moetrain.gather_rows, (x[:4], *where)),
        (torch.ops.moetrain.sum_rows, (x, *where)),
        (torch.ops.moetrain.swiglu, (gu, weight)),
        (torch.ops.moetrain.swiglu_backward, (gu, weight, x)),
        (torch.ops.moetrain.swiglu_tiles, (gu, weight, False)),
        (torch.ops.moetrain.swiglu_backward_tiles, (*quantise.tiles(gu)[:2], weight, x, torch.float32, False)),
        (torch.ops.moetrain.route, (x, None, 2, 4, 2, True, True)),
    ]
    for op, arguments in checks:
        torch.library.opcheck(op, arguments, test_utils="test_faketensor")


@pytest.mark.parametrize("power_of_two", [False, True])
def test_a_models_products_in_triton_are_the_reference(power_of_two):
    """Linear layer, SwiGLU, experts with one starved, forward and backward. 2e-2: ties, as above, layer over layer."""
    g = torch.Generator().manual_seed(9)
    E, T, D, m = 3, 40, 136, 64
    x, dy = torch.randn(T, D, generator=g), torch.randn(T, D, generator=g)
    up, down = torch.randn(E, 2 * m, D, generator=g) / 12, torch.randn(E, D, m, generator=g) / 8
    w, weight = torch.randn(D, D, generator=g) / 12, torch.rand(T, 2, generator=g)
    choice = torch.stack([torch.randperm(2, generator=g) for _ in range(T)])
    found = []
    for products in (Triton(), Reference()):
        fp8 = Fp8(products, power_of_two=power_of_two, attention_output="e5m6")
        leaves = [t.clone().requires_grad_() for t in (x, w, up, down, weight)]
        a, b, c, d, e = leaves
        y = fp8.linear_after_attention(fp8.linear(a, b), b)
        y = y + fp8.swiglu(y, c[0], d[0])
        y = y + fp8.experts(LocalDispatcher(E).send(y, choice, e), c, d)
        found.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    for mine, want in zip(*found, strict=True):
        close(mine, want.double(), 2e-2)
    assert not found[0][3][2].any(), "the third expert has no token"


def test_without_a_gpu_triton_is_refused_in_words():
    assert isinstance(products_for("auto", torch.device("cpu")), Reference)
    with pytest.raises(UserError, match="needs a GPU; use fp8"):
        products_for("triton", torch.device("cpu"))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_experts_in_triton_are_those_of_a_product_each(dtype, bound):
    """2e-2: two products after each other in bf16, rounded between."""
    g = torch.Generator().manual_seed(10)
    E, T, D, m = 4, 30, 72, 40
    x, dy = torch.randn(T, D, generator=g).to(dtype), torch.randn(T, D, generator=g).to(dtype)
    up, down = (torch.randn(E, 2 * m, D, generator=g) / 8).to(dtype), (torch.randn(E, D, m, generator=g) / 6).to(dtype)
    weight, choice = torch.rand(T, 2, generator=g), torch.stack([torch.randperm(3, generator=g)[:2] for _ in range(T)])
    found = []
    for experts in (backends.triton_experts, backends.looped_experts):
        kind = dtype if experts is backends.triton_experts else torch.float32
        leaves = [t.to(kind).requires_grad_() for t in (x, up, down)] + [weight.clone().requires_grad_()]
        a, b, c, w = leaves
        y = experts(LocalDispatcher(E).send(a, choice, w), b, c, in_place_grad=False)
        found.append([y.detach(), *torch.autograd.grad(y, leaves, dy.to(kind))])
    for mine, want in zip(*found, strict=True):
        close(mine, want.double(), bound)
    assert not found[0][2][3].any()
