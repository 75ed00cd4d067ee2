"""Experts spread over ranks: the same step as one process, in float64, whatever the routing.

1e-12 relative: sums in another order, nothing else.
"""

from __future__ import annotations

import functools
import gc
import sys
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from moetrain.accumulate import Balance
from moetrain.config.run import ParallelConfig
from moetrain.model import backends
from moetrain.model.dispatch import LocalDispatcher
from moetrain.model.moe import MoE
from moetrain.parallel import ep as ep_module
from moetrain.parallel.deep_ep import DeepEPDispatcher
from moetrain.parallel.ep import AllToAllDispatcher, OwnPart, reach
from moetrain.parallel.plan import spread
from moetrain.precision import Fp8, Fp8Rows, Reference
from moetrain.parallel.ranks import Ranks, meshes
from tests.support import deep_ep
from tests.support.processes import run_ranks
from tests.support.small import FAMILIES, V3, difference, every_loss, gradients_of, model, rank_window, same_report, sgd, state

pytestmark = pytest.mark.dist
BOUND = 1e-12


def ranks_of(rank, world, ep, copies=1):
    return Ranks(rank, world, torch.device("cpu"), *meshes("cpu", world, dp_replicate=copies, ep=ep))


def routed_to(m, experts):
    """Routing forced by the correction bias: every token takes these two."""
    for name, bias in m.named_buffers():
        if name.endswith("e_score_correction_bias") and experts:
            bias[list(experts)] = 10.0
    return m


def steps(m, config, scope, rank, world, **kwargs):
    still = {"bias_rate": 0.0} if kwargs.pop("still") else {}
    accumulator = sgd(m, config, every_loss(config, scope, **still), **kwargs)
    return [accumulator.step(rank_window(rank, world)) for _ in range(3)], state(m)


@functools.cache
def one_process(family, scope, forced):
    config = FAMILIES[family]
    return steps(routed_to(model(config), forced), config, scope, 0, 1, still=bool(forced))


def on_rank(rank, world, family, scope, ep, recompute, reduce, forced, copies):
    config = FAMILIES[family]
    m = routed_to(model(config), forced)
    plan = ParallelConfig(ep=ep, recompute=recompute, reduce=reduce, dp_replicate=copies)
    spread(m, plan, "float64", ranks_of(rank, world, ep, copies))
    return steps(m, config, scope, rank, world, still=bool(forced), reduce=reduce)


def agree(world, family, scope, ep, recompute="none", reduce="window", forced=(), copies=1):
    reports, parameters = one_process(family, scope, forced)
    results = run_ranks(on_rank, world, family, scope, ep, recompute, reduce, forced, copies)
    for got, got_parameters in results:
        for a, b in zip(got, reports, strict=True):
            same_report(a, b, BOUND)
        assert difference(got_parameters, parameters) < BOUND
    return reports


@pytest.mark.parametrize(("world", "ep"), [(2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("scope", ["sequence", "window"])
def test_spread_experts_change_nothing(world, ep, scope):
    agree(world, "V3", scope, ep)


@pytest.mark.parametrize("family", ["V2", "V2-Lite"])
def test_nor_in_the_other_families_nor_with_recompute(family):
    agree(2, family, "window", 2, recompute="full")


@pytest.mark.parametrize(("world", "ep"), [(2, 1), (4, 2)])
def test_nor_where_only_what_is_cheap_is_computed_again(world, ep):
    agree(world, "V3", "window", ep, recompute="selective")


@pytest.mark.parametrize("world", [2, 4])
def test_nor_when_gradients_are_reduced_each_time(world):
    agree(world, "V3", "sequence", 2, reduce="micro_batch")


def buffers_on_rank(rank, world, scope):
    """Where the gradients of spread experts lie after each backward of a window, whether FSDP2 has them, and whether
    every product was given weights whose gradients it adds to."""
    m = model()
    made, of = [], OwnPart.of
    OwnPart.of = lambda whole: made.append(of(whole)) or made[-1]
    spread(m, ParallelConfig(ep=2), "float64", ranks_of(rank, world, 2))
    experts = [x.experts for x in m.modules() if isinstance(x, MoE)]
    accumulator = sgd(m, V3, every_loss(V3, scope))
    backward, seen = accumulator.owner.backward, []

    def watched(loss):
        backward(loss)
        grads = [p.grad for layer in experts for p in held(layer)]
        seen.append([None if g is None else g.to_local().data_ptr() for g in grads])

    def held(layer):
        if not isinstance(layer, FSDPModule):
            return list(layer.parameters())
        return [p._unsharded_param for p in layer._get_fsdp_state()._fsdp_param_group.fsdp_params]

    accumulator.owner.backward = watched
    accumulator.step(rank_window(rank, world))
    OwnPart.of = of
    return [isinstance(layer, FSDPModule) for layer in experts], seen, len(made) == 2 * len(experts) * len(seen)


@pytest.mark.parametrize("scope", ["sequence", "window"])
@pytest.mark.parametrize("world", [2, 4])
def test_products_add_to_the_gradients_of_spread_experts_where_they_are(world, scope):
    """No copy, no adding pass; and experts that a rank holds alone need nothing of FSDP2."""
    for wrapped, seen, every_product in run_ranks(buffers_on_rank, world, scope):
        assert set(wrapped) == {world > 2} and every_product
        *earlier, last = seen
        assert earlier and all(place == earlier[0] and None not in place for place in earlier)
        assert last == ([None] * len(last) if world > 2 else earlier[0])  # what FSDP2 has is reduced by then


@pytest.mark.parametrize(("world", "ep", "recompute"), [(2, 1, "full"), (4, 1, "none"), (4, 2, "full")])
@pytest.mark.parametrize("scope", ["sequence", "window"])
def test_nor_do_two_copies_of_the_sharded_model(world, ep, recompute, scope):
    """HSDP: shards are summed over the copies as well, also where experts are spread inside each."""
    agree(world, "V3", scope, ep, recompute=recompute, copies=2)


@pytest.mark.parametrize("forced", [(0, 1), (6, 7)])
def test_a_rank_that_gets_every_token_and_ranks_that_get_none_change_nothing(forced):
    """All tokens to the first rank, or to the last: the others' experts have exact zero gradients and no rank waits."""
    reports = agree(4, "V3", "sequence", 4, recompute="full", forced=forced)
    assert bool((reports[0].load[0, [e for e in range(8) if e not in forced]] == 0).all())


def gradients_on_rank(rank, world):
    m = routed_to(model(), (0, 1))
    spread(m, ParallelConfig(ep=2), "float64", ranks_of(rank, world, 2))
    accumulator = sgd(m, V3, Balance(), max_norm=None)
    found = {}
    accumulator.owner.step = lambda: found.update(
        {n: (p.grad.to_local().abs().sum().item(), p.grad.to_local().numel()) for n, p in m.named_parameters()}
    )
    accumulator.step(rank_window(rank, world))
    return {n: v for n, v in found.items() if "mlp.experts.down_proj" in n}


def test_experts_without_a_token_have_zero_gradients_and_not_none():
    first, second = run_ranks(gradients_on_rank, 2)
    assert len(first) == len(second) == 3
    assert all(total > 0 and size for total, size in first.values())
    assert all(total == 0.0 and size for total, size in second.values())


def dispatched_on_rank(rank, world, over_deep_ep=False):
    """The dispatcher alone, with rows that travel once per rank: the sums of a local dispatcher."""
    g = torch.Generator().manual_seed(rank)
    E, T, K, D, m = 8, (0, 5, 1, 9)[rank], 3, 6, 4
    x = torch.randn(T, D, generator=g, dtype=torch.float64, requires_grad=True)
    choice = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(T)]) if T else torch.zeros(0, K).long()
    weight = torch.rand(T, K, generator=g, dtype=torch.float64, requires_grad=True)
    every = torch.Generator().manual_seed(99)
    gate_up = torch.randn(E, 2 * m, D, generator=every, dtype=torch.float64, requires_grad=True)
    down = torch.randn(E, D, m, generator=every, dtype=torch.float64, requires_grad=True)
    product = backends.REFERENCE.experts
    dispatcher = AllToAllDispatcher(dist.group.WORLD, E)
    if over_deep_ep:
        weight = weight.detach().float().double().requires_grad_()  # DeepEP's weights are fp32
        dispatcher = DeepEPDispatcher(deep_ep.Buffer(dist.group.WORLD), world, E)
    own = slice(rank * dispatcher.local, (rank + 1) * dispatcher.local)
    sent = dispatcher.send(x, choice, weight)
    y = dispatcher.combine(product(dispatcher.receive(sent), gate_up[own], down[own], in_place_grad=False), sent)
    out = torch.arange(D, dtype=torch.float64)
    (y * out).sum().backward()
    got = [y.detach(), x.grad.clone(), weight.grad.clone()]
    ours = torch.cat([gate_up.grad.flatten(), down.grad.flatten()])
    x.grad = weight.grad = gate_up.grad = down.grad = None
    routed_here = LocalDispatcher(E).send(x, choice, weight)
    y = LocalDispatcher(E).combine(product(routed_here, gate_up, down, in_place_grad=False), routed_here)
    (y * out).sum().backward()
    theirs = torch.cat([gate_up.grad.flatten(), down.grad.flatten()])
    for total in (ours, theirs):
        dist.all_reduce(total)
    want = [y.detach(), x.grad, weight.grad]
    travelled = sent.trip.handle[1] if over_deep_ep else sent.trip.rows[1]
    needed = [int((choice // dispatcher.local == r).any(dim=1).sum()) for r in range(world)]
    worst = max([float((a - b).abs().max()) for a, b in zip(got, want, strict=True) if a.numel()], default=0.0)
    return worst, float((ours - theirs).abs().max()), travelled == needed


def test_deep_ep_takes_the_place_of_all_to_all():
    """Against a stand-in that keeps its contract; 1e-4 since gradients of weights, some tens, come back in fp32."""
    for apart, weights_apart, once in run_ranks(dispatched_on_rank, 4, True):
        assert apart < 1e-4 and weights_apart < 1e-11 and once


def early_on_rank(rank, world):
    """Sums of experts where nobody waits for rows that are on their way."""
    deep_ep.Event.current_stream_wait = lambda self: None
    dispatcher = DeepEPDispatcher(deep_ep.Buffer(dist.group.WORLD), world, 4)
    x, choice, weight = torch.randn(5, 6), torch.arange(5)[:, None] % 4, torch.ones(5, 1)
    sent = dispatcher.send(x, choice, weight)
    return bool(sent.trip.out[0].isnan().all()), bool(dispatcher.combine(torch.zeros_like(sent.trip.out[0]), sent).isnan().all())


def test_the_stand_in_shows_who_reads_before_rows_are_here():
    assert run_ranks(early_on_rank, 2) == [(True, True)] * 2


def over_deep_ep_on_rank(rank, world, dispatch, recompute, precision):
    """Two steps of a whole model in fp32, through the plan, which finds the stand-in as the installed library."""
    sys.modules["deep_ep"] = deep_ep
    config = V3.model_copy(update={"hidden_size": 128})
    m = model(config, dtype=torch.float32)
    plan = ParallelConfig(ep=world, dispatch=dispatch, recompute=recompute)
    applied = spread(m, plan, precision, ranks_of(rank, world, world)).applied
    accumulator = sgd(m, config, every_loss(config, "window"))
    gradients = gradients_of(accumulator)
    reports = [accumulator.step(rank_window(rank, world)) for _ in range(2)]
    return reports, gradients, state(m), [line for line in applied if line.startswith("experts of")]


@pytest.mark.parametrize(
    ("world", "recompute", "precision"),
    [(2, "none", "fp32"), (2, "selective", "fp8"), pytest.param(4, "full", "fp32", marks=pytest.mark.slow)],
)
def test_a_models_step_over_deep_ep_is_the_one_over_all_to_all(world, recompute, precision):
    """1e-5 for fp32 sums of a token's rows in another order; in FP8 both round alike."""
    want = run_ranks(over_deep_ep_on_rank, world, "all_to_all", recompute, precision)
    for got, wanted in zip(run_ranks(over_deep_ep_on_rank, world, "deep_ep", recompute, precision), want, strict=True):
        for a, b in zip(got[0], wanted[0], strict=True):
            same_report(a, b, 1e-5)
        for a, b in zip(got[1], wanted[1], strict=True):
            assert difference(a, b) < 1e-5
        assert difference(got[2], wanted[2]) < 1e-5
        assert ", DeepEP" in got[3][0] and ", all-to-all" in wanted[3][0]


def weights_on_rank(rank, world, precision):
    """What experts are given of the router, where they are and where tokens travel to them."""
    seen = set()
    for ep in (1, world):
        m = model(V3, dtype=torch.float32)
        spread(m, ParallelConfig(ep=ep), precision, ranks_of(rank, world, ep))
        for layer in (x for x in m.modules() if isinstance(x, MoE)):
            product = layer.experts.product

            def watched(routed, *weights, product=product, ep=ep, **kwargs):
                seen.add((ep, routed.x_RD.dtype, routed.weight_N.dtype))
                return product(routed, *weights, **kwargs)

            layer.experts.product = watched
        sgd(m, V3, every_loss(V3, "window")).step(rank_window(rank, world))
    return seen


@pytest.mark.parametrize(("precision", "computed"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_routers_weights_stay_fp32_in_half_precision(precision, computed):
    """FSDP2 casts what a wrapped module is given, and spread experts are wrapped by themselves."""
    want = {(ep, computed, torch.float32) for ep in (1, 2)}
    assert run_ranks(weights_on_rank, 2, precision) == [want] * 2


def test_the_dispatcher_sends_a_token_once_to_each_rank_that_needs_it():
    for apart, weights_apart, once in run_ranks(dispatched_on_rank, 4):
        assert apart < 1e-12 and weights_apart < 1e-11 and once


def placed_on_rank(rank, world, config):
    """Most ranks that any token's rows went to in a step with wild routing, and what the plan says of it."""
    m = model(config)
    applied = spread(m, ParallelConfig(ep=world), "float64", ranks_of(rank, world, world)).applied
    most, sent = 0, []
    for layer in (x for x in m.modules() if isinstance(x, MoE)):
        inner = layer.dispatcher.send

        def send(x, choice, weight, inner=inner, local=layer.dispatcher.local):
            nonlocal most
            ranks_of_tokens = [len(set(token)) for token in (choice // local).tolist()]
            most = max(most, *ranks_of_tokens)
            out = inner(x, choice, weight)
            sent.append(sum(ranks_of_tokens) == sum(out.trip.rows[1]))
            return out

        layer.dispatcher.send = send
    sgd(m, config, Balance()).step(rank_window(rank, world))
    return most, all(sent), applied


@pytest.mark.parametrize(
    ("family", "groups", "kept", "most", "cut"),
    [
        ("V3", 4, 2, 2, False),  # a rank is a group
        ("V2", 4, 2, 2, False),
        ("V3", 8, 2, 2, False),  # two groups on a rank
        ("V3", 2, 1, 2, False),  # a group on two ranks
        ("V3", 1, 1, 4, False),  # no groups: as far as its experts are
        ("V3", 6, 2, 4, True),  # the first group's experts on one rank, the second's on two
    ],
)
def test_a_token_goes_to_no_more_ranks_than_its_groups_have(family, groups, kept, most, cut):
    """Node-limited routing: at most ``topk_group`` groups, and each of them on as few ranks as can hold it."""
    sizes = {"n_routed_experts": 24 if cut else 16, "n_group": groups, "topk_group": kept, "num_experts_per_tok": 4}
    config = FAMILIES[family].model_copy(update={**sizes, "initializer_range": 1.0})
    found = run_ranks(placed_on_rank, 4, config)
    assert reach(config, 4) == most
    assert max(reached for reached, _, _ in found) <= most and all(as_sent for _, as_sent, _ in found)
    assert groups > 1 or max(reached for reached, _, _ in found) == most  # without groups it would be more
    for _, _, applied in found:
        assert any(f"a token goes to {most} at most" in line for line in applied)
        assert any("cuts the model's 6 expert groups" in line for line in applied) == cut


def fp8_on_rank(rank, world, kind):
    """Rows in FP8 on the way, both ways of sending them, against the sums of experts that are all here."""
    g = torch.Generator().manual_seed(rank)
    E, T, K, D, m = 4, (7, 0)[rank], 2, 160, 72
    x, weight = torch.randn(T, D, generator=g).requires_grad_(), torch.rand(T, K, generator=g).requires_grad_()
    choice = torch.randint(0, E, (T, K), generator=g)
    every = torch.Generator().manual_seed(9)
    gate_up, down = torch.randn(E, 2 * m, D, generator=every), torch.randn(E, D, m, generator=every)
    fp8 = Fp8(Reference())
    here = LocalDispatcher(E)
    there = AllToAllDispatcher(dist.group.WORLD, E, wire=Fp8Rows())
    if kind == "deep_ep":
        there = DeepEPDispatcher(deep_ep.Buffer(dist.group.WORLD), world, E, fp8=True)
    sizes = []
    there.count = lambda kind, sent: sizes.append((sent.dtype, sent.numel()))
    found = []
    for dispatcher, own in ((here, slice(None)), (there, slice(rank * 2, rank * 2 + 2))):
        sent = dispatcher.send(x, choice, weight)
        y = dispatcher.combine(fp8.experts(dispatcher.receive(sent), gate_up[own], down[own]), sent)
        found.append([y.detach(), *torch.autograd.grad((y * torch.linspace(-1, 1, D)).sum(), (x, weight))])
    apart = [float((a - b).norm() / b.norm().clamp(min=1e-9)) for b, a in zip(*found, strict=True)]
    return apart, any(dtype in (torch.uint8, torch.float8_e4m3fn) for dtype, _ in sizes)


@pytest.mark.parametrize("kind", ["all_to_all", "deep_ep"])
def test_tokens_in_fp8_give_what_they_would_have_given_unsent(kind):
    """Products see the same operands; 1e-6 for sums of a token's experts in another order."""
    for apart, fp8 in run_ranks(fp8_on_rank, 2, kind):
        assert max(apart) < 1e-6 and fp8


def trips_on_rank(rank, world, recompute):
    """How many journeys of rows there were in two steps, and how many are still in memory."""
    gc.disable()
    trips, made = [], ep_module.Trip.__init__

    def counted(self, *args):
        made(self, *args)
        trips.append(weakref.ref(self))

    ep_module.Trip.__init__ = counted
    m = model()
    spread(m, ParallelConfig(ep=2, recompute=recompute), "float64", ranks_of(rank, world, 2))
    accumulator = sgd(m, V3, every_loss(V3, "sequence"))
    for _ in range(2):
        accumulator.step(rank_window(rank, world))
    return len(trips), sum(trip() is not None for trip in trips)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_rows_that_travelled_are_freed(recompute):
    """By reference counts alone: through C++ no collector sees a cycle, and a step's rows would stay for ever."""
    for made, alive in run_ranks(trips_on_rank, 2, recompute):
        assert made > 10 and alive == 0


def error_on_rank(rank, world, ep, where):
    """A window that ends with an exception on every rank, and what the next one says."""
    m = model()
    spread(m, ParallelConfig(ep=ep), "float64", ranks_of(rank, world, ep))
    accumulator = sgd(m, V3, every_loss(V3, "sequence"))
    calls = []

    def fails(module, *args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("somebody's hook")

    layer = m.layers[2].mlp.shared_experts
    hook = layer.register_forward_pre_hook if where == "forward" else layer.register_full_backward_pre_hook
    handle = hook(fails)
    said = []
    for _ in range(2):
        try:
            accumulator.step(rank_window(rank, world))
        except (KeyError, RuntimeError) as error:
            said.append(str(error))
        handle.remove()
    return said


@pytest.mark.parametrize("ep", [1, 2])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_exception_in_a_window_fsdp_takes_no_wrong_step(ep, where):
    for first, second in run_ranks(error_on_rank, 2, ep, where):
        assert "somebody's hook" in first and "a window ended with KeyError" in second and "build model" in second
