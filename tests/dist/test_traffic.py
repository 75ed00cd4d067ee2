"""What a step sends, by its own counter, against arithmetic and against torch's record of the real calls."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from moetrain.accumulate import MoEAccumulator
from moetrain.config.run import ParallelConfig
from moetrain.engine.pipeline import Pipeline
from moetrain.model import DeepSeekLoss
from moetrain.model.moe import MoE
from moetrain.parallel.plan import spread
from moetrain.parallel.ranks import Ranks, meshes
from tests.support.processes import run_ranks
from tests.support.small import V3, every_loss, model, rank_window, sgd, window

pytestmark = pytest.mark.dist
FP64 = 8
K = len(rank_window(0, 2))


class Calls(TorchDispatchMode):
    """Every collective that reaches torch's dispatcher, by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.names.append(func.__name__.split(".")[0])
        return func(*args, **(kwargs or {}))


def on_rank(rank, world, wrapper, scope, reduce, copies=1):
    m = model()
    elements = sum(p.numel() for p in m.parameters())
    # every FSDP group pads each parameter's first dimension to a multiple of the ranks
    shards = world // copies
    padded = sum(-(-p.shape[0] // shards) * shards * p[0].numel() for p in m.parameters())
    ranks = Ranks(rank, world, torch.device("cpu"), *meshes("cpu", world, dp_replicate=copies))
    wrapped: torch.nn.Module = m
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(m, broadcast_buffers=False)
    elif wrapper == "their own":
        for layer in m.layers:
            fully_shard(layer, mesh=ranks.mesh, reshard_after_forward=False)
        fully_shard(m, mesh=ranks.mesh)
    elif wrapper.startswith("fsdp"):
        plan = ParallelConfig(reduce=reduce, dp_replicate=copies, reshard_after_forward=wrapper != "fsdp, kept")
        spread(m, plan, "float64", ranks)
    accumulator = sgd(wrapped, V3, every_loss(V3, scope), reduce=reduce)
    for _ in range(2):  # DDP settles its buckets after the first
        accumulator.step(rank_window(rank, world))
    with Calls() as real:
        report = accumulator.step(rank_window(rank, world))
    return elements, padded, dict(report.traffic), real.names


@pytest.mark.parametrize("wrapper", ["plain", "ddp", "fsdp"])
@pytest.mark.parametrize("scope", ["sequence", "running", "window"])
def test_gradients_are_reduced_once_a_window_and_nothing_is_sent_uncounted(wrapper, scope):
    for elements, padded, traffic, real in run_ranks(on_rank, 2, wrapper, scope, "window"):
        assert sum(kind.calls for kind in traffic.values()) == len(real)
        assert traffic["gradients"].bytes == FP64 * (padded if wrapper == "fsdp" else elements)
        if wrapper == "fsdp":
            groups = V3.num_hidden_layers + V3.num_nextn_predict_layers + 1  # blocks, and the root
            assert traffic["gradients"].calls == real.count("_reduce_scatter_base_") == groups
            assert traffic["parameters"].calls == real.count("_allgather_base_")
            assert traffic["norm"].calls == 1
        else:
            assert traffic["gradients"].calls < 5  # buckets, not parameters
            assert "parameters" not in traffic and "norm" not in traffic
        assert traffic["counts"].calls == traffic["report"].calls == 1
        assert traffic.get("balance", (0,))[0] == {"sequence": 0, "running": K, "window": 1}[scope]


@pytest.mark.parametrize(("wrapper", "scope"), [("fsdp, kept", "sequence"), ("fsdp, kept", "window"), ("their own", "running")])
def test_weights_that_stay_after_a_forward_stay_for_the_window(wrapper, scope):
    for _, padded, traffic, real in run_ranks(on_rank, 2, wrapper, scope, "window"):
        assert traffic["parameters"].bytes == padded * FP64
        assert sum(kind.calls for kind in traffic.values()) == len(real)


def test_reducing_in_every_micro_batch_sends_the_gradients_that_many_times():
    (_, padded, traffic, _), _ = run_ranks(on_rank, 2, "fsdp", "sequence", "micro_batch")
    assert traffic["gradients"].bytes == K * padded * FP64


def test_copies_of_a_sharded_model_are_summed_once_a_window_too():
    for _, padded, traffic, real in run_ranks(on_rank, 4, "fsdp", "sequence", "window", 2):
        assert sum(kind.calls for kind in traffic.values()) == len(real)
        assert traffic["gradients"].bytes == FP64 * (padded + padded // 2)  # into shards, and shards over copies


def inside_backward_on_rank(rank, world, wrapper, scope, reduce):
    m = model()
    wrapped: torch.nn.Module = m
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(m, broadcast_buffers=False)
    else:
        spread(m, ParallelConfig(reduce=reduce), "float64", Ranks(rank, world, torch.device("cpu"), *meshes("cpu", world)))
    accumulator = sgd(wrapped, V3, every_loss(V3, scope), reduce=reduce)
    accumulator.step(rank_window(rank, world))
    count, seen = accumulator.traffic.count, []

    def watched(kind, whole):
        if kind == "gradients":
            seen.append(torch._C._current_graph_task_id() != -1)  # -1: no backward is running
        count(kind, whole)

    accumulator.traffic.count = watched
    accumulator.step(rank_window(rank, world))
    return seen


@pytest.mark.parametrize(
    ("wrapper", "scope", "reduce"),
    [("fsdp", "sequence", "window"), ("fsdp", "window", "window"), ("fsdp", "sequence", "micro_batch"), ("ddp", "sequence", "window")],
)
def test_gradients_are_sent_while_the_backward_runs_and_not_after_it(wrapper, scope, reduce):
    for seen in run_ranks(inside_backward_on_rank, 2, wrapper, scope, reduce):
        assert seen and all(seen)


def watch_rows(m, own):
    """What will have been sent when a step is over: [rows that travel, entries], by the router's choices alone."""
    sent = [0, 0]
    for layer in (x for x in m.modules() if isinstance(x, MoE)):
        inner = layer.dispatcher.send

        def send(x, choice, weight, inner=inner):
            sent[0] += sum(len(set(tokens)) for tokens in (choice // own).tolist())
            sent[1] += choice.numel()
            return inner(x, choice, weight)

        layer.dispatcher.send = send
    return sent


def experts_on_rank(rank, world, precision="float64"):
    m = model(dtype=torch.float64 if precision == "float64" else torch.float32)
    spread(m, ParallelConfig(ep=world), precision, Ranks(rank, world, torch.device("cpu"), *meshes("cpu", world, ep=world)))
    accumulator = sgd(m, V3, every_loss(V3, "sequence"))
    sent = watch_rows(m, V3.n_routed_experts // world)
    with Calls() as real:
        report = accumulator.step(rank_window(rank, world))
    return *sent, dict(report.traffic), real.names


@pytest.mark.parametrize("world", [2, 4])
def test_tokens_travel_once_to_each_rank_that_holds_their_experts(world):
    """docs/traffic.md, all ranks together: 4 R D for rows and their gradients, 4 N for weights and places, 2 G a rank."""
    layers = V3.num_hidden_layers - V3.first_k_dense_replace + V3.num_nextn_predict_layers
    slots = len(rank_window(0, world))
    found = run_ranks(experts_on_rank, world)
    rows, entries = (sum(rank[i] for rank in found) for i in (0, 1))
    sizes = world * layers * slots * 2 * world
    sent = sum(traffic["experts"].bytes for _, _, traffic, _ in found)
    assert sent == FP64 * (4 * rows * V3.hidden_size + 4 * entries + sizes)
    for _, _, traffic, real in found:
        assert traffic["experts"].calls == 8 * layers * slots  # forward: sizes and four, backward: three
        assert sum(kind.calls for kind in traffic.values()) == len(real)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_in_fp8_half_of_what_travels_is_a_byte_a_value_and_one_for_each_128(world):
    """docs/traffic.md: rows to experts, and gradients to their outputs; sums on their way back are fp32 here."""
    layers = V3.num_hidden_layers - V3.first_k_dense_replace + V3.num_nextn_predict_layers
    found = run_ranks(experts_on_rank, world, "fp8")
    rows, entries = (sum(rank[i] for rank in found) for i in (0, 1))
    sizes = world * layers * len(rank_window(0, world)) * 2 * world
    D, fp32, int64 = V3.hidden_size, 4, 8
    sent = sum(traffic["experts"].bytes for _, _, traffic, _ in found)
    assert sent == 2 * rows * (D + -(-D // 128)) + 2 * rows * D * fp32 + 2 * entries * (fp32 + int64) + int64 * sizes


DEEPER = V3.model_copy(update={"num_hidden_layers": 5})


def combined_on_rank(rank, world, keys):
    m, plan = model(DEEPER), ParallelConfig(**keys)
    where = meshes("cpu", world, dp_replicate=plan.dp_replicate, ep=plan.ep, pp=plan.pp, need_group=plan.pp == 1)
    ranks = Ranks(rank, world, torch.device("cpu"), *where)
    spread(m, plan, "float64", ranks)
    loss = DeepSeekLoss(DEEPER)
    pipeline = None if ranks.pipe is None else Pipeline(m, loss, plan, ranks, dtype=torch.float64)
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
    accumulator = MoEAccumulator(m, optimizer, loss=loss, groups=ranks.groups, pipeline=pipeline)
    mine = rank_window(ranks.data_rank, ranks.data_world)
    accumulator.step(mine)
    sent = watch_rows(m, DEEPER.n_routed_experts // plan.ep)
    with Calls() as real:
        traffic = accumulator.step(mine).traffic
    return [n for n, _ in m.named_parameters()], sent, dict(traffic), real.names, (ranks.data_rank, ranks.data_world)


@pytest.mark.parametrize(
    ("world", "keys"),
    [
        (4, {"ep": 2, "dp_replicate": 2}),  # a copy has each part of the experts once
        (8, {"ep": 2, "pp": 2}),
        *(
            pytest.param(*layout, marks=pytest.mark.slow)
            for layout in (
                (4, {"ep": 2}),
                (8, {"ep": 2, "dp_replicate": 2}),
                (4, {"pp": 2}),
                (8, {"ep": 2, "pp": 2, "dp_replicate": 2}),
            )
        ),
    ],
    ids=str,
)
def test_layouts_together_send_what_the_formulas_say(world, keys):
    """docs/traffic.md: every kind, on every rank."""
    ep, pp, copies = (keys.get(key, 1) for key in ("ep", "pp", "dp_replicate"))
    shards, D = world // pp // copies, DEEPER.hidden_size
    shape = {name: p.shape for name, p in model(DEEPER).named_parameters()}

    def elements(names, ranks, parts=1):
        return sum(-(-shape[n][0] // parts // ranks) * ranks * shape[n][1:].numel() for n in names)

    found = run_ranks(combined_on_rank, world, keys)
    data_groups = 1 if copies == 1 else 2
    for names, _, traffic, real, (data_rank, data_world) in found:
        K = len(rank_window(data_rank, data_world))
        experts = [n for n in names if ep > 1 and ".mlp.experts." in n]
        blocks = [n for n in names if (n.startswith("layers.") or ".block." in n) and n not in experts]
        root = [n for n in names if n not in experts and n not in blocks]
        holders = shards // ep  # ranks of a copy with the same experts
        dense, spread_out = elements(blocks + root, shards), elements(experts, holders, ep)
        gradients = dense + (spread_out if holders > 1 else 0)
        if copies > 1:
            gradients += dense // shards + spread_out // holders
        if pp > 1:
            gradients += DEEPER.vocab_size * D // shards  # the embedding is on both stages
        assert traffic["gradients"].bytes == FP64 * gradients
        gathered = elements(blocks, shards) + (spread_out if holders > 1 else 0)
        assert traffic["parameters"].bytes == FP64 * (2 * K * gathered + elements(root, shards))
        layers = sum(n.endswith("mlp.gate.weight") for n in names)
        assert ep == 1 or traffic["experts"].calls == 8 * layers * K
        if pp > 1:
            B = max(item.input_ids.shape[0] for item in rank_window(data_rank, data_world))
            assert traffic["stages"] == (K, FP64 * K * B * 12 * D)
        assert traffic["counts"] == (data_groups, data_groups * 48)
        assert traffic["norm"].calls == 1 + (2 if ep > 1 else 0) + (pp > 1)
        assert traffic["report"].calls == data_groups + (pp > 1)
        assert sum(kind.calls for kind in traffic.values()) == sum(not name.startswith("recv") for name in real)
    if ep > 1:
        rows, entries = (sum(sent[i] for _, sent, *_ in found) for i in (0, 1))
        asked = sum(traffic["experts"].calls // 8 for *_, traffic, _, _ in found)  # every layer and micro-batch
        sent = sum(traffic["experts"].bytes for *_, traffic, _, _ in found)
        assert sent == FP64 * (4 * rows * D + 4 * entries + 2 * ep * asked)


def stages_on_rank(rank, world, schedule):
    config = V3.model_copy(update={"num_hidden_layers": 5})
    m = model(config)
    parallel = ParallelConfig(pp=2, schedule=schedule, reshard_after_forward=False)
    ranks = Ranks(rank, world, torch.device("cpu"), *meshes("cpu", world, pp=2, need_group=False))
    spread(m, parallel, "float64", ranks)
    loss = DeepSeekLoss(config)
    accumulator = MoEAccumulator(
        m,
        torch.optim.SGD(m.parameters(), lr=0.1),
        loss=loss,
        groups=ranks.groups,
        pipeline=Pipeline(m, loss, parallel, ranks, dtype=torch.float64),
    )
    accumulator.step(window([1] * 6))
    return dict(accumulator.step(window([1] * 6)).traffic)


@pytest.mark.parametrize(("schedule", "boundaries"), [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 3), ("dualpipev", 2)])
def test_stages_send_hidden_states_over_each_boundary_between_ranks_and_gradients_back(schedule, boundaries):
    """docs/traffic.md: 2 K B T D over each; a V has its middle boundary on one rank."""
    found = run_ranks(stages_on_rank, 2, schedule)
    whole = sum(traffic["stages"].bytes for traffic in found)
    assert whole == FP64 * 2 * boundaries * 6 * 1 * 12 * V3.hidden_size
    assert sum(traffic["stages"].calls for traffic in found) == 2 * boundaries * 6


def test_one_process_sends_nothing():
    accumulator = sgd(model(), V3, every_loss(V3, "running"))
    assert accumulator.step(rank_window(0, 1)).traffic == {}


def noise_on_rank(rank, world, wrapper):
    m = model()
    ranks = Ranks(rank, world, torch.device("cpu"), init_device_mesh("cpu", (world,), mesh_dim_names=("dp_shard",)))
    wrapped: torch.nn.Module = m
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(m)
    elif wrapper == "fsdp":
        spread(m, ParallelConfig(), "float64", ranks)
    report = sgd(wrapped, V3, every_loss(V3, "previous"), measure_noise=True).step(rank_window(rank, world))
    return tuple(map(float, report.noise))


def spread_noise_on_rank(rank, world):
    m = model()
    spread(m, ParallelConfig(ep=2), "float64", Ranks(rank, world, torch.device("cpu"), *meshes("cpu", world, ep=2)))
    with pytest.raises(ValueError, match="experts spread over ranks"):
        sgd(m, V3, every_loss(V3, "previous"), measure_noise=True)


def test_spread_experts_have_no_gradient_of_one_rank_s_own_to_measure():
    run_ranks(spread_noise_on_rank, 2)


def test_every_wrapper_measures_the_same_noise():
    plain = run_ranks(noise_on_rank, 2, "plain")
    assert plain[0] == plain[1]
    for wrapper in ("ddp", "fsdp"):
        for got in run_ranks(noise_on_rank, 2, wrapper):
            assert got == pytest.approx(plain[0], rel=1e-10)
