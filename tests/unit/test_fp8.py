"""FP8 by the V3 recipe: quantisers bit for bit, products by formula, what stays high, and the law as far as it goes."""

from __future__ import annotations

import pytest
import torch

from moetrain.accumulate import MoEAccumulator
from moetrain.checkpoint import fp8_blocks
from moetrain.model import DeepSeekLoss
from moetrain.model.dispatch import LocalDispatcher
from moetrain.parallel.plan import use_fp8
from moetrain.precision import Fp8, Fp8Rows, Reference
from moetrain_kernels.quantise import E4M3_MAX, GRADIENTS, blocks, columns, e5m6, quantise, tiles
from tests.support.small import V3, difference, every_loss, model, state, window

WIDE = V3.model_copy(update={"hidden_size": 160, "moe_intermediate_size": 136, "intermediate_size": 200})


FP8 = Fp8(Reference())
VERBS = [FP8.linear, FP8.linear_after_attention, FP8.swiglu, FP8.experts]


def e4m3(x):
    """Rounding to E4M3 in float64 from its definition: 3 bits of mantissa, exponents -6 to 8, ties to even."""
    sign, size = x.sign(), x.abs()
    exponent = torch.floor(torch.log2(size.clamp(min=2.0**-300))).clamp(min=-6.0)
    step = torch.exp2(exponent - 3)
    rounded = torch.round(size / step) * step  # torch rounds halves to even
    return rounded.clamp(max=E4M3_MAX) * sign


def reference(x, tile, power_of_two):
    """Scale and values in float64; the two roundings to fp32 are those that the definition has."""
    R, C = x.shape
    values, scales = torch.zeros(R, C, dtype=torch.float64), []
    for r in range(0, R, tile[0]):
        row = []
        for c in range(0, C, tile[1]):
            part = x[r : r + tile[0], c : c + tile[1]].double()
            scale = (part.abs().max().float().clamp(min=1e-4) / 448.0).double()
            if power_of_two:
                scale = torch.exp2(torch.ceil(torch.log2(scale)))
            row.append(scale)
            values[r : r + tile[0], c : c + tile[1]] = e4m3((part / scale).float().double())
        scales.append(torch.stack(row))
    return values, torch.stack(scales)


def samples(kind, shape, g):
    x = torch.randn(shape, generator=g)
    return {
        "normal": x,
        "wide": x * torch.exp(8 * torch.randn(shape, generator=g)),
        "tiny": x * 1e-38,
        "huge": x * 1e37,
        "zeros": torch.zeros(shape),
        "one outlier": torch.where(torch.rand(shape, generator=g) < 0.002, x * 1e6, x),
        "subnormal in E4M3": x * 2.0 ** torch.randint(-20, 0, shape, generator=g),
        "on ties": (torch.randint(-64, 64, shape, generator=g) / 16.0)
        * 2.0 ** torch.randint(-6, 5, shape, generator=g),
    }[kind]


KINDS = ["normal", "wide", "tiny", "huge", "zeros", "one outlier", "subnormal in E4M3", "on ties"]


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("tile", [(1, 128), (128, 1), (128, 128)])
@pytest.mark.parametrize("kind", KINDS)
def test_quantisers_are_the_float64_reference_bit_for_bit(kind, tile, power_of_two):
    g = torch.Generator().manual_seed(KINDS.index(kind))
    for shape in ((1, 1), (3, 130), (130, 5), (128, 256), (200, 300)):
        x = samples(kind, shape, g)
        got = quantise(x, tile, power_of_two=power_of_two)
        values, scale = reference(x, tile, power_of_two)
        assert torch.equal(got.scale.double(), scale.float().double()), shape
        assert torch.equal(got.values.double(), values), shape
        assert torch.isfinite(got.dequantise()).all()


def test_every_e4m3_value_comes_back():
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    x = every.float()[every.float().isfinite()].repeat(2).unsqueeze(0)[:, :252]
    x[:, 0] = 448.0  # so that the scale is one
    x = x[:, :128]
    assert torch.equal(quantise(x, (1, 128)).dequantise(), x) and quantise(x, (1, 128)).scale.item() == 1.0


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_does_not_become_a_number(bad):
    x = torch.randn(4, 256)
    x[2, 200] = bad
    back = tiles(x).dequantise()
    assert not back[2, 128:].isfinite().any() or not back[2, 200].isfinite()
    assert back[[0, 1, 3]].isfinite().all() and back[2, :128].isfinite().all()


def test_blocks_are_those_of_released_files():
    w = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    values, scale = fp8_blocks.quantise(w)
    want, scales = reference(w, (128, 128), False)
    assert torch.equal(values.double(), want) and torch.equal(scale.double(), scales)
    back = fp8_blocks.dequantise(values, scale)
    for r in range(0, 300, 128):
        for c in range(0, 200, 128):
            part = (slice(r, r + 128), slice(c, c + 128))
            assert torch.equal(back[part], values[part].float() * scale[r // 128, c // 128])


def deq(q):
    return q.dequantise(torch.float64)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shape", [(5, 40, 24), (130, 200, 136), (1, 128, 128)])
def test_the_three_products_of_a_linear_layer(shape, in_place):
    """Against the formulas in float64; operands are what the recipe says, so only the sums' order differs."""
    n, inputs, outputs = shape
    g = torch.Generator().manual_seed(1)
    x, w, dy = (torch.randn(s, generator=g) for s in ((n, inputs), (outputs, inputs), (n, outputs)))
    x.requires_grad_(), w.requires_grad_()
    y = FP8.linear(x, w, in_place_grad=in_place)
    y.backward(dy)
    y = y.detach()
    xd, wd = x.detach(), w.detach()
    want_y = deq(tiles(xd)) @ deq(blocks(wd)).T
    want_dx = deq(tiles(dy, floor=GRADIENTS)) @ deq(blocks(wd))
    want_dw = deq(columns(dy, floor=GRADIENTS)).T @ deq(columns(tiles(xd).dequantise()))
    for got, want in ((y, want_y), (x.grad, want_dx), (w.grad, want_dw)):
        assert torch.allclose(got.double(), want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))
        assert float((got.double() - want).norm() / want.norm()) < 1e-5
    assert 0.005 < float((want_y - xd.double() @ wd.double().T).norm() / want_y.norm()) < 0.06  # and E4M3 it is


def by_formula(x, gate_up, down, weight, choice, dy, experts=True):
    """Outputs and gradients of experts in float64, each operand quantised as docs/precision.md says."""
    E, m = gate_up.shape[0], down.shape[2]
    x, gate_up, down, weight = (t.detach() for t in (x, gate_up, down, weight))
    xq, dyq = (deq(tiles(t, power_of_two=experts)) for t in (x, dy))
    y, dx, dgu_w, ddown_w, dweight = (torch.zeros_like(t, dtype=torch.float64) for t in (x, x, gate_up, down, weight))
    for e in range(E):
        token, k = (choice == e).nonzero(as_tuple=True)
        if not token.numel():
            continue
        w = weight[token, k].double().unsqueeze(1)
        up_q, down_q = torch.cat([deq(blocks(p)) for p in gate_up[e].chunk(2)]), deq(blocks(down[e]))
        gu = (xq[token] @ up_q.T).float()
        h = torch.nn.functional.silu(gu[:, :m]) * gu[:, m:] * w.float()
        y.index_add_(0, token, deq(tiles(h)) @ down_q.T)
        waited = deq(tiles(gu))
        gate, up = waited[:, :m], waited[:, m:]
        act, slope = torch.nn.functional.silu(gate), torch.sigmoid(gate) * (1 + gate * (1 - torch.sigmoid(gate)))
        g = dyq[token] @ down_q
        dweight[token, k] = (g * act * up).sum(1)
        again = tiles((act * up * w).float()).dequantise()
        ddown_w[e] = deq(columns(dyq[token].float())).T @ deq(columns(again))
        dgu = torch.cat([g * w * up * slope, g * w * act], dim=1).float()
        dgu_w[e] = deq(columns(dgu)).T @ deq(columns(xq[token].float()))
        dx.index_add_(0, token, deq(tiles(dgu)) @ up_q)
    return y, dx, dgu_w, ddown_w, dweight


@pytest.mark.parametrize("starved", [False, True])
def test_experts_are_their_formula(starved):
    """1e-2: an operand near a tie may be rounded to either side, since it comes from an fp32 sum here (seen: 3e-3)."""
    g = torch.Generator().manual_seed(2)
    E, T, K, D, m = 4, 50, 2, 160, 72
    x = torch.randn(T, D, generator=g, requires_grad=True)
    up = torch.randn(E, 2 * m, D, generator=g, requires_grad=True)
    down = torch.randn(E, D, m, generator=g, requires_grad=True)
    weight = torch.rand(T, K, generator=g, requires_grad=True)
    choice = torch.stack([torch.randperm(2 if starved else E, generator=g)[:K] for _ in range(T)])
    out = torch.randn(T, D, generator=g)
    y = FP8.experts(LocalDispatcher(E).send(x, choice, weight), up, down)
    found = [y.detach(), *torch.autograd.grad((y * out).sum(), (x, up, down, weight))]
    for a, b in zip(found, by_formula(x, up, down, weight, choice, out), strict=True):
        assert float((a.double() - b).norm() / b.norm()) < 1e-2
    if starved:
        assert bool((found[2][2:] == 0).all() and (found[3][2:] == 0).all())


@pytest.mark.parametrize("kind", KINDS)
def test_what_travels_to_experts_is_what_they_would_have_made_of_it(kind):
    """Power-of-two tiles quantised again are themselves, so rows may travel or not, and arrive as they left."""
    x = samples(kind, (40, 300), torch.Generator().manual_seed(0))
    once = tiles(x, power_of_two=True)
    wire = Fp8Rows()
    sent = wire.encode(x, gradient=False)
    arrived = wire.decode(sent, x)
    assert sent.dtype == torch.uint8 and sent.shape == (40, 303)
    assert torch.equal(arrived, once.dequantise())
    assert torch.equal(tiles(arrived, power_of_two=True).dequantise(), arrived)
    assert torch.equal(wire.decode(sent, x.bfloat16()).float(), arrived), "and bf16 holds it"


def test_what_is_not_finite_arrives_so():
    x = torch.randn(3, 256)
    x[0, 5], x[1, 200] = torch.inf, torch.nan
    wire = Fp8Rows()
    arrived = wire.decode(wire.encode(x, gradient=False), x)
    assert not arrived[0, :128].isfinite().any() and not arrived[1, 128:].isfinite().all()
    assert arrived[2].isfinite().all()


@pytest.mark.parametrize("kind", KINDS)
def test_e5m6_rounds_to_six_bits(kind):
    """Against its definition in float64: 6 bits of mantissa, exponents from -14 on, ties to even; 1.5 bytes a value."""
    x = samples(kind, (7, 301), torch.Generator().manual_seed(4))
    got = e5m6(x)
    assert got.packed.shape == (7, 453)
    for c in range(0, 301, 128):
        part = x[:, c : c + 128].double()
        scale = got.scale[:, c // 128].double().unsqueeze(1)
        assert torch.equal(torch.log2(scale), torch.log2(scale).round())
        assert bool((part.abs() / scale <= 65024).all())
        size = part.abs() / scale
        exponent = torch.floor(torch.log2(size.clamp(min=2.0**-300))).clamp(min=-14.0)
        step = torch.exp2(exponent - 6)
        want = torch.round(size / step) * step * part.sign()
        assert torch.equal((got.dequantise(torch.float64)[:, c : c + 128] / scale), want)


@pytest.mark.parametrize("shrunk", [2.0**-20, 2.0**-40])
def test_gradients_lose_nothing_as_the_global_batch_grows(shrunk):
    """A mean over more tokens shrinks every gradient; a power of two may change no bit of it but the exponent."""
    g = torch.Generator().manual_seed(5)
    x, up, down = (torch.randn(s, generator=g) for s in ((20, 136), (3, 2 * 72, 136), (3, 136, 72)))
    weight, choice = torch.rand(20, 2, generator=g), torch.randint(0, 3, (20, 2), generator=g)
    w, dy = torch.randn(136, 136, generator=g), 1e-2 * torch.randn(20, 136, generator=g)
    leaves = [t.requires_grad_() for t in (x, up, down, weight, w)]
    y = FP8.experts(LocalDispatcher(3).send(FP8.linear(x, w), choice, weight), up, down)
    whole, small = (torch.autograd.grad(y, leaves, dy * s, retain_graph=True) for s in (1.0, shrunk))
    for a, b in zip(whole, small, strict=True):
        assert a.abs().max() > 0 and torch.equal(a * shrunk, b)
    arrived = Fp8Rows().decode(Fp8Rows().encode(dy * shrunk, gradient=True), dy)
    assert torch.equal(arrived, tiles(dy, power_of_two=True).dequantise() * shrunk)


def test_memory_that_another_weight_lay_in_does_not_give_its_values():
    """Gathered weights come and go; two of a shape may lie at one address, one after the other."""
    fp8, x = Fp8(Reference(), keep_weights=True), torch.randn(4, 128)
    memory = torch.empty(128, 128)
    at = torch._C._construct_storage_from_data_pointer
    for seed in (0, 1):
        memory.copy_(torch.randn(128, 128, generator=torch.Generator().manual_seed(seed)))
        w = torch.empty(0).set_(at(memory.data_ptr(), memory.device, memory.nbytes), 0, (128, 128))
        assert torch.equal(fp8.linear(x, w), FP8.linear(x, w))


def test_the_layer_after_the_attention_may_keep_twelve_bits():
    g = torch.Generator().manual_seed(1)
    x, w, dy = (torch.randn(s, generator=g) for s in ((130, 200), (136, 200), (130, 136)))
    found = {}
    for keeps in ("e4m3", "e5m6"):
        fp8 = Fp8(Reference(), attention_output=keeps)
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = fp8.linear_after_attention(a, b)
        y.backward(dy)
        found[keeps] = y.detach(), a.grad, b.grad
    for same in (0, 1):
        assert torch.equal(found["e4m3"][same], found["e5m6"][same])
    want = deq(columns(dy)).T @ deq(columns(e5m6(x).dequantise()))
    assert float((found["e5m6"][2].double() - want).norm() / want.norm()) < 1e-5
    assert not torch.equal(found["e4m3"][2], found["e5m6"][2])


def test_quantised_weights_are_made_once_a_window_and_again_after_a_step():
    made = []

    class Counted(Reference):
        def weight(self, w, parts, **kwargs):
            made.append(w.shape)
            return super().weight(w, parts, **kwargs)

    fp8 = Fp8(Counted(), keep_weights=True)
    m = model(WIDE, dtype=torch.float32)
    use_fp8(m, fp8)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    optimizer.register_step_post_hook(fp8.drop)
    accumulator = MoEAccumulator(m, optimizer, loss=DeepSeekLoss(WIDE))
    accumulator.step(window([1, 2, 3]))
    weights = len(made)
    accumulator.step(window([1, 2, 3]))
    assert len(made) == 2 * weights
    plain = model(WIDE, dtype=torch.float32)
    use_fp8(plain, FP8)
    other = MoEAccumulator(plain, torch.optim.SGD(plain.parameters(), lr=0.1), loss=DeepSeekLoss(WIDE))
    for _ in range(2):
        other.step(window([1, 2, 3]))
    assert difference(state(m), state(plain)) == 0.0
    with torch.no_grad():  # and whoever changes a weight by hand is not given the old one
        m.layers[0].mlp.down_proj.weight.mul_(0.5)
    before = len(made)
    accumulator.step(window([1, 2, 3]))
    assert len(made) == before + weights


def test_swiglu_keeps_its_input_in_tiles_and_no_output():
    g = torch.Generator().manual_seed(3)
    x, up, down = (torch.randn(s, generator=g, requires_grad=True) for s in ((20, 136), (2 * 72, 136), (136, 72)))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        FP8.swiglu(x, up, down)
    assert {t.dtype for t in kept} <= {torch.float8_e4m3fn, torch.float32}
    wide = [t for t in kept if t.dtype == torch.float32]
    assert all(t.shape[-1] <= 2 for t in wide), "only scales are kept in fp32"


def built(config=WIDE):
    m = model(config, dtype=torch.float32)
    blocks_, moe = WIDE.num_hidden_layers + 1, WIDE.num_hidden_layers
    assert use_fp8(m, FP8) == 5 * blocks_ + 2 * moe + 1  # projections; experts, shared and routed; one dense
    return m


def test_what_stays_high_stays_high():
    m = built()
    replaced = {name for name, x in m.named_modules() if getattr(x, "product", None) in VERBS}
    ends = {name.split(".")[-1] for name in replaced}
    assert ends == {
        "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "mlp", "shared_experts", "experts",
    }  # fmt: skip
    assert not replaced & {"lm_head", "mtp.0.eh_proj", "embed_tokens"}


def stepped(sizes):
    m = built()
    accumulator = MoEAccumulator(
        m,
        torch.optim.SGD(m.parameters(), lr=0.1),
        loss=DeepSeekLoss(WIDE),
        balance=every_loss(WIDE, "window"),
        max_norm=1.0,
    )
    return accumulator.step(window(sizes)), state(m)


def test_cutting_a_batch_changes_the_routing_nowhere_and_the_loss_by_the_order_of_sums():
    """Rows are quantised alone and weights are the same, so forwards are the same. Wgrad's columns are of 128 tokens of
    one micro-batch: there the cut shows, by roundings of E4M3 (seen: 2.5 % of a weight's gradient)."""
    want, parameters = stepped([6])
    for sizes in ([1, 2, 3], [2, 0, 4]):
        got, cut = stepped(sizes)
        assert torch.equal(got.load, want.load)
        assert float(got.total) == pytest.approx(float(want.total), rel=1e-6)
        assert float(got.grad_norm) == pytest.approx(float(want.grad_norm), rel=2e-2)
        assert difference(cut, parameters) < 5e-3
