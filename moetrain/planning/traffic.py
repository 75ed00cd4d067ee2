"""What a window sends, by kind and by link, before it is sent: the formulas of docs/traffic.md.

Bytes are of the whole tensors, as ``StepReport.traffic`` counts them on one rank. What of them crosses links of a node
and the network between nodes follows from where ranks lie: neighbours share a stage, in it a copy, and in that an
expert group (``moetrain.parallel.ranks.meshes``).
"""

from __future__ import annotations

from dataclasses import dataclass

from moetrain.planning.hardware import Cluster
from moetrain.planning.layout import Layout
from moetrain.planning.memory import ROOT
from moetrain.planning.trace import rows_per_token


@dataclass(frozen=True)
class Flow:
    """One kind of a window's traffic on one rank.

    Attributes:
        kind: as in ``StepReport.traffic``.
        whole: bytes of whole tensors.
        node, network: bytes that this GPU sends over links of its node, and to other nodes.
        seconds: how long the links are busy with it.
    """

    kind: str
    whole: float
    node: float
    network: float
    seconds: float


@dataclass(frozen=True)
class _Group:
    """Ranks of a collective: how many, and how many of them share a node."""

    ranks: int
    together: int


def _spread(ranks: int, stride: int, cluster: Cluster) -> _Group:
    """A group of ``ranks`` ranks, ``stride`` apart."""
    return _Group(ranks, max(1, min(ranks, cluster.hardware.per_node // max(1, stride))))


def _ring(kind: str, whole: float, group: _Group, cluster: Cluster) -> Flow:
    """An all-gather or reduce-scatter: each rank passes (n - 1) / n of the whole on; between nodes all network cards of
    the group's GPUs on a node work at once (rings of NCCL)."""
    hw = cluster.hardware
    passed = whole * (group.ranks - 1) / group.ranks
    if group.ranks == group.together:
        return Flow(kind, whole, passed, 0.0, passed / hw.link)
    speed = min(hw.link, group.together * hw.network) if group.together > 1 else hw.network
    return Flow(kind, whole, passed if group.together > 1 else 0.0, passed / group.together, passed / speed)


def _sum(flows: list[Flow]) -> list[Flow]:
    found: dict[str, Flow] = {}
    for flow in flows:
        if flow.whole:
            b = found.get(flow.kind, Flow(flow.kind, 0.0, 0.0, 0.0, 0.0))
            found[flow.kind] = Flow(
                flow.kind,
                b.whole + flow.whole,
                b.node + flow.node,
                b.network + flow.network,
                b.seconds + flow.seconds,
            )
    return list(found.values())


def traffic(layout: Layout, cluster: Cluster, rank: int = 0) -> list[Flow]:
    """Of a window, on pipeline rank ``rank``."""
    p = layout.config.parallel
    stored, computed = (dtype.itemsize for dtype in layout.dtypes)
    K, ep = layout.slots, p.ep
    flows: list[Flow] = []
    copies = _spread(p.dp_replicate, layout.shards, cluster)
    for place, parameters in layout.groups(rank).items():
        n = layout.ranks_of(place)
        apart = ep if place[1] == "experts" and ep > 1 else 1
        group = _spread(n, apart, cluster)
        padded = sum(q.shard(n) for q in parameters) * n
        width = computed if layout.cast and place[1] != "gate" else stored
        if layout.sharded and n > 1:
            passes = 3 if layout.config.counts_first else 2
            resharded = p.reshard_after_forward and place != ROOT
            # what stays after a forward stays for the window; a counting pass gives nothing back
            gathers = K * passes if resharded else 1
            flows.append(_ring("parameters", gathers * padded * width, group, cluster))
        times = K if p.reduce == "micro_batch" and layout.sharded and not layout.split else 1
        if layout.sharded and n > 1:
            flows.append(_ring("gradients", times * padded * stored, group, cluster))
        if p.dp_replicate > 1:
            shard = padded / n
            both = _ring("gradients", 2 * times * shard * stored, copies, cluster)  # an all-reduce is two passes
            flows.append(Flow("gradients", both.whole / 2, both.node, both.network, both.seconds))
    flows += _copy(layout, cluster, rank)
    flows += _experts(layout, cluster, rank)
    flows += _stages(layout, cluster, rank)
    return _sum(flows)


def _copy(layout: Layout, cluster: Cluster, rank: int) -> list[Flow]:
    """The embedding's gradient between the first and the last stage, where multi-token prediction needs it on both."""
    config, p = layout.config, layout.config.parallel
    if p.pp == 1 or not config.model.num_nextn_predict_layers or rank not in (0, p.pp - 1):
        return []
    if p.pp > 1 and {0, p.stages - 1} <= set(layout.stages(0)):
        return []
    (embedding, *_) = layout.groups(0)[ROOT]
    size = embedding.shard(layout.shards) * layout.dtypes[0].itemsize
    together = 2 if layout.data_world * p.pp <= cluster.hardware.per_node else 1
    both = _ring("gradients", 2.0 * size, _Group(2, together), cluster)
    return [Flow("gradients", size, both.node, both.network, both.seconds)]


def _experts(layout: Layout, cluster: Cluster, rank: int) -> list[Flow]:
    """Rows to the ranks of their experts and back. Where DeepEP carries them (``parallel.dispatch`` auto on GPUs), a
    token crosses the network once for each node."""
    config, p = layout.config, layout.config.parallel
    model, hw = config.model, cluster.hardware
    if p.ep == 1:
        return []
    layers = sum(
        sum(model.is_moe_layer(i) for i in part.layers) + (model.num_nextn_predict_layers if part.last else 0)
        for part in (layout.parts[stage] for stage in layout.stages(rank))
    )
    tokens = layout.rows * config.data.seq_len
    width = layout.dtypes[1].itemsize
    D, per_token = model.hidden_size, rows_per_token(model, p.ep)
    there = D + -(-D // 128) if config.precision == "fp8" else D * width
    back = D * width
    rows = round(tokens * per_token) * layout.imbalance
    entries = tokens * model.num_experts_per_tok
    stat = max(4, width)
    # rows there and their gradients back, sums back and their gradients there; weights, places
    forward = rows * (there + back) + entries * (stat + 16) + 16 * p.ep
    backward = rows * (back + there) + entries * stat
    passes = 2 if p.recompute == "full" else 1
    passes += 1 if layout.config.counts_first else 0
    whole = layout.slots * layers * (passes * forward + backward)
    together = min(p.ep, hw.per_node)
    nodes = p.ep // together
    other = 1.0 - 1.0 / nodes  # of the rows, those for other nodes
    crossing = 1.0
    if nodes > 1 and cluster.device == "cuda" and p.dispatch != "all_to_all":
        crossing = rows_per_token(model, nodes) / per_token
    network = whole * other * crossing
    inside = whole * (1.0 - 1.0 / p.ep) - (network if crossing == 1.0 else 0.0)
    seconds = max(inside / hw.link, network / hw.network)
    return [Flow("experts", whole, inside, network, seconds)]


def _stages(layout: Layout, cluster: Cluster, rank: int) -> list[Flow]:
    config, p = layout.config, layout.config.parallel
    if p.pp == 1:
        return []
    hidden = layout.rows * config.data.seq_len * config.model.hidden_size * layout.dtypes[1].itemsize
    own = set(layout.stages(rank))
    forwards = 2 if config.counts_first else 1
    sends = forwards * sum(stage < p.stages - 1 and stage + 1 not in own for stage in own)
    sends += sum(stage > 0 and stage - 1 not in own for stage in own)
    whole = layout.slots * hidden * sends
    if layout.data_world >= cluster.hardware.per_node:
        return [Flow("stages", whole, 0.0, whole, whole / cluster.hardware.network)]
    return [Flow("stages", whole, whole, 0.0, whole / cluster.hardware.link)]
