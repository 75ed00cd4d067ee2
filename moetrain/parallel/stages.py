"""Pipeline stages: where the model is cut, and which rank holds what.

Blocks differ in cost (dense and mixture-of-experts ones; the head and multi-token prediction come on top of the last),
so the cut is the one whose most expensive stage is cheapest, and not the one with equal numbers of layers.

A schedule with two stages on each rank lays them in a loop (rank r holds r, r + P, ...), or in a V (r and 2P - 1 - r)
where its name says so: then the first and the last stage share a rank, and with it one embedding.
"""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from moetrain.config.model import ModelConfig
from moetrain.config.run import ParallelConfig, V
from moetrain.model import DeepSeek
from moetrain.model.deepseek import Part
from moetrain.model.flops import flops_of_parts


def cut(model: ModelConfig, stages: int, seq_len: int) -> list[Part]:
    """``stages`` parts of at least one block each, such that the largest cost (FLOPs of a token) is smallest."""
    block, head = flops_of_parts(model, seq_len)
    n = len(block)
    # best[s][i]: of blocks i.. in s stages, the smallest largest cost, and the end of the first of them
    best: list[dict[int, tuple[float, int]]] = [{}, {i: (sum(block[i:]) + head, n) for i in range(n)}]
    for s in range(2, stages + 1):
        best.append({})
        for i in range(n - s + 1):
            ends = range(i + 1, n - s + 2)
            best[s][i] = min((max(sum(block[i:end]), best[s - 1][end][0]), end) for end in ends)
    edges = [0]
    for s in range(stages, 0, -1):
        edges.append(best[s][edges[-1]][1])
    return [
        Part(range(first, end), first=k == 0, last=k == stages - 1) for k, (first, end) in enumerate(pairwise(edges))
    ]


def stages_of(config: ParallelConfig, rank: int) -> list[int]:
    """Numbers of the stages on pipeline rank ``rank``."""
    if config.schedule in V:
        return [rank, 2 * config.pp - 1 - rank]
    return list(range(rank, config.stages, config.pp))


def slots(config: ParallelConfig, wanted: int) -> int:
    """As many micro-batches as the schedule needs to run, ``wanted`` at least."""
    if config.pp == 1:
        return wanted
    if config.schedule in ("1f1b", "dualpipev"):
        return max(wanted, config.stages)
    if config.schedule in ("interleaved_1f1b", "interleaved_zero_bubble"):
        while wanted % max(1, wanted // config.pp):
            wanted += 1
    return wanted


def keep(model: DeepSeek, parts: list[Part]) -> None:
    """Drops what none of these parts computes; what stays keeps its name.

    The model's ``elsewhere`` says what was dropped, for those who look for it.
    """
    whole = set(model.state_dict())
    layers = {i for part in parts for i in part.layers}
    for i in range(len(model.layers)):
        if i not in layers:
            setattr(model.layers, str(i), None)
    last = any(part.last for part in parts)
    if not last:
        model.norm = model.lm_head = None  # type: ignore[assignment]
        model.mtp = nn.ModuleList()
    if not any(part.first for part in parts) and not (last and len(model.mtp)):
        model.embed_tokens = None  # type: ignore[assignment]
    model.elsewhere = frozenset(whole - set(model.state_dict()))
