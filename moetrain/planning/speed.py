"""How long a step takes: a roofline with its assumptions written down, none of them fitted to a run.

Matrix products at a share of the peak, everything else at the speed of memory (bytes that operators make, counted in
the trace, written once and read once), links at their data sheet rates; what may overlap does, as far as there is
compute to hide it; the pipeline's bubble by schedule (V3 paper, table 2). It orders layouts and says days, not percent.
"""

from __future__ import annotations

from dataclasses import dataclass

from moetrain.config.model import ModelConfig
from moetrain.model.flops import flops_per_token, parameter_counts
from moetrain.planning.hardware import Cluster
from moetrain.planning.layout import Layout
from moetrain.planning.states import rank_states
from moetrain.planning.trace import Piece, pieces
from moetrain.planning.traffic import Flow, traffic

#: share of the matrix peak that large products reach: cuBLAS in bf16 about 700 of an H100's 989 TFLOP/s; DeepGEMM's
#: README has 1,100 to 1,350 of an H800's 1,979 TFLOP/s in FP8 for V3's shapes; FlashAttention-3 (arXiv 2407.08608)
#: about 600 forward and 500 backward with head size 128 and a causal mask
MATRIX, MATRIX_FP8, ATTENTION = 0.70, 0.60, 0.55
#: share of the memory bandwidth that elementwise kernels reach
MEMORY = 0.80
#: share of links' data sheet rates that large transfers reach (DeepEP's README: 153 GB/s of an H800's 200, 43 of 50)
LINKS = 0.80
#: of an H800's 132 multiprocessors, those that V3 gives to communication where it hides behind compute (3.2.2)
COMMUNICATION_SMS = 20 / 132
#: fp32 on the development machine, whose data sheet says nothing (facts: 60 to 150 GFLOP/s)
CPU_FP32 = 60e9


@dataclass(frozen=True)
class Speed:
    """Seconds of a step on the slowest pipeline rank, by what they are spent on, and what follows.

    Attributes:
        step: seconds.
        by: ``products``, ``attention``, ``memory``, ``recompute``, ``bubble``, ``optimizer``, and traffic that nothing
            hides, by kind.
        tokens: tokens/s of each GPU.
        mfu: of the dense bf16 peak, by the published convention (main model, causal, no recompute).
        flows: traffic of a window on that rank.
    """

    step: float
    by: dict[str, float]
    tokens: float
    mfu: float
    flows: tuple[Flow, ...]


@dataclass(frozen=True)
class _Work:
    """FLOPs of a piece's forward for one token: in the low precision where there is one, in the high one, of attention;
    of what selective recompute does again; and of the shared experts, which run while rows travel."""

    low: float
    high: float
    attention: float
    again: float
    shared: float


def _work(model: ModelConfig, seq_len: int, name: str) -> _Work:
    c = parameter_counts(model)
    d = model.hidden_size
    if name == "embed":
        return _Work(0.0, 0.0, 0.0, 0.0, 0.0)
    attention = float(model.num_attention_heads * (model.qk_head_dim + model.v_head_dim) * seq_len)  # causal half of 2
    up = 2.0 * c.key_value
    if model.q_lora_rank is not None:
        up += 2.0 * model.q_lora_rank * model.num_attention_heads * model.qk_head_dim
    moe = _Work(
        2.0 * (c.attention + c.shared + model.num_experts_per_tok * c.expert),
        2.0 * model.n_routed_experts * d,
        attention,
        up,
        2.0 * c.shared,
    )
    if name == "moe":
        return moe
    if name == "dense":
        return _Work(2.0 * (c.attention + c.dense_ffn), 0.0, attention, up, 0.0)
    depth = model.num_nextn_predict_layers
    return _Work(
        depth * moe.low,
        2.0 * c.head * (1 + depth) + depth * (moe.high + 4.0 * d * d),
        depth * attention,
        depth * up,
        depth * moe.shared,
    )


def speed(layout: Layout, cluster: Cluster, *, fused: bool = False) -> Speed:
    """Of the slowest pipeline rank.

    ``fused``: elementwise work costs only what no kernel can spare, what waits for its backward written and read once,
    and gradients of that size; default: every tensor that today's operators make.
    """
    return max((_of_rank(layout, cluster, ranks[0], fused) for ranks in layout.alike), key=lambda each: each.step)


def _of_rank(layout: Layout, cluster: Cluster, rank: int, fused: bool) -> Speed:
    config, p, hw = layout.config, layout.config.parallel, cluster.hardware
    model, T = config.model, config.data.seq_len
    traced = pieces(model, layout.kind)
    low_rate = hw.fp8 * MATRIX_FP8 if config.precision == "fp8" and hw.fp8 else hw.bf16 * MATRIX
    high_rate, attention_rate, memory_rate = hw.bf16 * MATRIX, hw.bf16 * ATTENTION, hw.memory_bandwidth * MEMORY
    if config.precision in ("fp32", "float64"):
        # products of fp32 in TF32: half of bf16's rate (data sheets)
        low_rate, high_rate, attention_rate = low_rate / 2, high_rate / 2, attention_rate / 2
    if cluster.device == "cpu":
        low_rate = high_rate = attention_rate = CPU_FP32
    tokens = layout.rows * T

    forward = backward = weights = attention = memory = recompute = shared = 0.0
    names: list[tuple[str, Piece]] = []
    for stage in layout.stages(rank):
        part = layout.parts[stage]
        names += [("embed", traced.embed)] * part.first + [("end", traced.end)] * part.last
        for i in part.layers:
            moe = model.is_moe_layer(i)
            names.append(("moe" if moe else "dense", traced.block(moe)))
    for name, piece in names:
        work = _work(model, T, name)
        balanced = layout.imbalance if name in ("moe", "end") else 1.0
        product = tokens * (work.low * balanced / low_rate + work.high / high_rate)
        core = tokens * work.attention / attention_rate
        made_forward, made_backward = (2.0 * made / memory_rate for made in (piece.waits if fused else piece.made))
        again = 0.0
        if p.recompute == "full":
            again = product + core
        elif p.recompute == "selective":
            again = tokens * work.again / low_rate
        forward += product + core + made_forward
        backward += 2.0 * product + 2.5 * core + made_backward + again  # a fused backward makes the scores again
        weights += product
        attention += 3.5 * core
        memory += made_forward + made_backward
        recompute += again
        shared += tokens * work.shared / low_rate
    K = layout.slots
    counting = K * forward if layout.config.counts_first else 0.0
    compute = K * (forward + backward) + counting
    by = {
        "products": 3.0 * K * weights,
        "attention": K * attention,
        "memory": K * memory,
        "recompute": K * recompute + counting,
    }

    flows = traffic(layout, cluster, rank)
    exposed = {flow.kind: flow.seconds / LINKS for flow in flows}
    if p.schedule == "dualpipev" and p.pp > 1:
        # forwards of one direction run beside backwards of the other, and hide their traffic; a share of the
        # multiprocessors carries it
        by["communication units"] = compute * COMMUNICATION_SMS if "experts" in exposed else 0.0
        hidden = compute
        exposed["stages"] = 0.0
    else:
        hidden = 3.0 * K * shared  # rows travel while shared experts run, in both directions
    exposed["experts"] = max(0.0, exposed.get("experts", 0.0) - hidden)
    exposed["parameters"] = max(0.0, exposed.get("parameters", 0.0) - compute)  # prefetched
    last = backward if p.reduce == "window" else K * backward
    exposed["gradients"] = max(0.0, exposed.get("gradients", 0.0) - last)
    by |= {f"waiting for {kind}": seconds for kind, seconds in exposed.items() if seconds}

    by["bubble"] = _bubble(layout, forward, backward, weights)
    by["optimizer"], by["host"], by["drive"] = _optimizer(layout, cluster, rank)
    step = sum(by.values())
    each = config.batch.global_batch * T / step / cluster.count
    mfu = flops_per_token(model, T) * each / (hw.bf16 if cluster.device != "cpu" else CPU_FP32)
    return Speed(step, {k: v for k, v in by.items() if v}, each, mfu, tuple(flows))


def _bubble(layout: Layout, forward: float, backward: float, weights: float) -> float:
    """Idle seconds of a rank in a window (V3 paper, table 2; F, B, W of all that the rank holds)."""
    p = layout.config.parallel
    if p.pp == 1:
        return 0.0
    F, B, W, n = forward, backward, weights, p.pp
    each = p.stages // p.pp
    match p.schedule:
        case "gpipe" | "1f1b":
            return (n - 1) * (F + B)
        case "interleaved_1f1b" | "looped_bfs":
            return (n - 1) * (F + B) / each
        case "interleaved_zero_bubble" | "zbv_zero_bubble":
            return max(0.0, (n - 1) * (F + B - 2 * W) / each)
        case _:  # two directions; chunks are half of what a rank holds
            return max(0.0, (n - 1) * (F + B + B - 3 * W) / each)


def _optimizer(layout: Layout, cluster: Cluster, rank: int) -> tuple[float, float, float]:
    """Seconds of the optimizer's step, of what travels between device and host in a window, and of what a drive reads
    and writes."""
    config, p, hw = layout.config, layout.config.parallel, cluster.hardware
    stored = layout.dtypes[0].itemsize
    moment = 2 if config.optimizer.moments == "bf16" else stored
    own = sum(q.shard(layout.ranks_of(place)) for place, ps in layout.groups(rank).items() for q in ps)
    touched = own * (2 * stored + 2 * stored + 4 * moment)  # weights and moments read and written, gradients read twice
    on_host = p.offload_states
    travels = driven = 0.0
    K = layout.slots
    if config.engine == "native" and on_host:
        times = 2 * K if p.reshard_after_forward else 1
        reduced = K if p.reduce == "micro_batch" else 1
        travels = own * stored * (times + reduced)
    if config.engine == "deepspeed":
        zero, states = config.deepspeed, rank_states(config, layout.world)
        on_host = zero.offload_optimizer != "none"
        numbers = sum(q.numel for ps in layout.groups(rank).values() for q in ps) / layout.world
        used = numbers * 2 * 2 * K  # weights, forward and backward
        if zero.offload_parameters != "none":
            travels += used
        if zero.offload_parameters == "nvme":
            driven += used
        if on_host:
            sums = 4 if zero.zero_stage == 3 else 2
            travels += numbers * (2 * K - 1) * sums + numbers * 2  # added up on the device, back and forth; new weights
            touched = states.host + states.device
        if zero.offload_optimizer == "nvme":
            driven += 2 * (states.drive - (numbers * 2 if zero.offload_parameters == "nvme" else 0))
    rate = hw.memory_bandwidth * MEMORY
    if on_host and cluster.device == "cuda":
        rate = hw.host_bandwidth * MEMORY / cluster.here
    # nothing of it is taken to hide behind compute: DeepSpeed waits for each sum, a drive for each part of the states
    link = travels / (hw.host_link * LINKS) if cluster.device == "cuda" else 0.0
    return touched / rate, link, driven * cluster.here / hw.drive_bandwidth
