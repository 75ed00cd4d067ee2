"""The peak of tensor bytes in a real run, rank by rank, and what the plan says of it."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
import torch.distributed as dist

from moetrain.accumulate import MoEAccumulator, Window
from moetrain.config.run import RunConfig
from moetrain.engine import DeepSpeedEngine, Engine, NativeEngine
from moetrain.model import DeepSeekLoss
from moetrain.parallel import ep
from moetrain.parallel.plan import needs_group
from moetrain.parallel.ranks import Ranks, meshes
from moetrain.planning.layout import Layout
from moetrain.planning.memory import Action, order, rank_memory
from moetrain.planning.tensors import TensorMemory, training_kinds
from tests.support.processes import run_plain

STEPS = 3  # the first makes moments and buffers, the others are alike


def predicted_and_measured(config: RunConfig, world: int) -> tuple[int, int]:
    """Peak bytes, those on the host too, of the rank where they are furthest apart (of DeepSpeed: of the fullest, which
    is what the plan is of)."""
    pairs = []
    for rank, run in enumerate(measured(config, world)):
        plans = []
        for window in run["shares"]:
            layout = Layout(config, world, "cpu", shares=tuple(tuple(slot.items()) for slot in window))
            plans.append(rank_memory(layout, rank // layout.data_world))
        pairs.append((max(plan.peak + plan.host for plan in plans), run["peak"]))
    if config.engine == "deepspeed":
        return max(pairs, key=lambda pair: pair[1])
    return max(pairs, key=lambda pair: abs(pair[0] / pair[1] - 1))


def measured(config: RunConfig, world: int, timeout: float = 240) -> list[dict[str, Any]]:
    """Of each rank: ``peak`` bytes of the later steps, and ``shares`` of their windows: by slot, and unit of the model,
    entries its experts got over the mean."""
    with tempfile.TemporaryDirectory() as folder:
        return run_plain(_on_rank, world, config, folder, timeout=timeout)


def _on_rank(rank: int, world: int, config: RunConfig, folder: str) -> dict[str, Any]:
    p, alone = config.parallel, needs_group(config.precision, config.parallel)
    spread: Any = (None,)
    zero = config.engine == "deepspeed"
    if world > 1 or alone or zero:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        spread = meshes("cpu", world, dp_replicate=p.dp_replicate, ep=p.ep, pp=p.pp, need_group=alone or zero)
    ranks = Ranks(rank, world, torch.device("cpu"), *spread)
    layout = Layout(config, world, "cpu")
    loss = DeepSeekLoss(config.model)
    everything = TensorMemory()
    engine: Engine
    if zero:
        with everything:  # what DeepSpeed holds, nobody else knows
            engine = DeepSpeedEngine(config, ranks)
    else:
        engine = NativeEngine(config, ranks, loss)
    accumulator = MoEAccumulator(
        engine.model,
        engine.optimizer,
        loss=loss,
        balance=layout.balance,
        max_norm=1.0,
        groups=ranks.groups,
        window_order="counting_pass" if config.counts_first else "forwards_first",
        device=ranks.device,
        pipeline=engine.pipeline,
        owner=engine.owner,
    )
    shares: dict[str, list[float]] = {}

    class Watched(ep.Trip):
        def __init__(self, dispatcher: Any, rows: Any, entries: Any) -> None:
            super().__init__(dispatcher, rows, entries)
            shares.setdefault(dispatcher.layer, []).append(sum(entries[0]) / max(1, sum(entries[1])))

    ep.Trip = Watched  # type: ignore[misc]
    memory = everything if zero else TensorMemory(training_kinds(engine.model, engine.optimizer))
    torch.manual_seed(ranks.data_rank)
    count = -(-config.batch.global_batch // ranks.data_world)
    size = min(config.batch.micro_batch, count)
    slots = -(-count // size)
    with memory:
        memory.kinds = {}  # what was there before has been counted
        for step in range(STEPS):
            rows = torch.randint(0, config.model.vocab_size, (slots * size, config.data.seq_len))
            window = Window({"input_ids": ids.clone(), "labels": ids.clone()} for ids in rows.split(size))
            del rows
            if step == 1:
                memory.reset_peak()
                shares.clear()
            accumulator.step(window)
            del window
    if dist.is_initialized():
        dist.destroy_process_group()
    return {"peak": memory.peak, "shares": _by_window(shares, layout, ranks)}


def _by_window(shares: dict[str, list[float]], layout: Layout, ranks: Ranks) -> list[list[dict[str, float]]]:
    """What layers sent, in the order of their forwards: a block that runs again in a backward sends again."""
    p, pipe = layout.config.parallel, ranks.rank // layout.data_world
    actions = [Action(what, 0, slot) for slot in range(layout.slots) for what in "FB"]
    if p.pp > 1:
        actions = order(layout, pipe, layout.slots)
    windows: list[list[dict[str, float]]] = [[{} for _ in range(layout.slots)] for _ in range(STEPS - 1)]
    for name, found in shares.items():
        kind, layer = name.split(".")[:2]
        stage = len(layout.parts) - 1
        if kind == "layers":
            stage = next(i for i, part in enumerate(layout.parts) if int(layer) in part.layers)
        sent = [a.slot for a in actions if a.stage == stage and (a.what == "F" or p.recompute == "full")]
        assert len(found) == len(sent) * len(windows)
        for i, share in enumerate(found):
            windows[i // len(sent)][sent[i % len(sent)]][f"{kind}.{layer}"] = share
    return windows
