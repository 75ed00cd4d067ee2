"""A run's own training step at full scale, without its memory and without a GPU.

The plan's numbers are formulas over traced pieces. Here the real thing runs: model, ``spread``, FSDP2, torch's pipeline
schedules, the accumulator's window and AdamW, as one rank of any number of ranks, on fake tensors (which have sizes and
no values) and a process group that has ranks and no wires. Memory is counted from every storage that is made
(``moetrain.planning.tensors``), traffic from the collectives' operators.

What has to be said, since values do not exist: tokens go to experts evenly, and what the host asks of values (the norm,
the loss) is answered with 1. Fake tensors of a CUDA device need a CUDA build, so these lie on the CPU, and the plan
chooses for them what it would choose on CUDA (``Ranks.stands_for``); attention stands for a fused kernel.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import resource
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from moetrain.accumulate import MoEAccumulator, Window
from moetrain.config import RunConfig
from moetrain.engine import NativeEngine
from moetrain.errors import UserError
from moetrain.model import DeepSeekLoss, Weights
from moetrain.model.mla import MLA
from moetrain.model.moe import MoE
from moetrain.parallel.ep import AllToAllDispatcher
from moetrain.parallel.plan import needs_group
from moetrain.parallel.ranks import Ranks, meshes
from moetrain.planning.hardware import Cluster
from moetrain.planning.layout import Layout
from moetrain.planning.memory import RankMemory, rank_memory
from moetrain.planning.tensors import TensorMemory, training_kinds
from moetrain.planning.trace import FusedAttention, even_dispatcher
from moetrain.planning.traffic import traffic

#: what of a window's traffic the plan has formulas for; the rest (counts, norm, report) are a few numbers
PLANNED = ("parameters", "gradients", "experts", "stages")


@dataclass(frozen=True)
class DryRank:
    """One rank's step.

    Attributes:
        rank: pipeline rank.
        alike: pipeline ranks that hold as much, this one among them.
        peak, by: bytes counted, and of what (``moetrain.planning.tensors``).
        planned: what the plan's formula gives for it; None for schedules with split backwards, which it has none for.
        traffic: bytes by kind: counted by the step, and planned.
        wire: bytes by operator, counted from the collectives themselves.
        seconds: of a processor that it took here.
        resident: bytes of host memory that it took here.
    """

    rank: int
    alike: tuple[int, ...]
    peak: int
    by: dict[str, int]
    planned: RankMemory | None
    traffic: dict[str, tuple[int, float]]
    wire: dict[str, int]
    seconds: float
    resident: int


@dataclass(frozen=True)
class DryRun:
    """``micro_batches``: of the window that was run, which is as short as the schedule allows."""

    config: RunConfig
    cluster: Cluster
    micro_batches: int
    ranks: tuple[DryRank, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "config": self.config.name,
            "gpus": str(self.cluster),
            "micro_batches": self.micro_batches,
            "ranks": [dataclasses.asdict(rank) for rank in self.ranks],
        }


def dry_run(config: RunConfig, cluster: Cluster) -> DryRun:
    """Runs one window of each pipeline rank that holds something else than the ones before it.

    Raises:
        UserError: the layout does not divide the GPUs, or cannot be run dry.
    """
    elsewhere = {
        "engine: deepspeed": ("engine=native", config.engine != "native"),
        "parallel.offload_states": ("parallel.offload_states=false", config.parallel.offload_states),
        "parallel.offload_activations": ("parallel.offload_activations=false", config.parallel.offload_activations),
    }
    for what, (mend, kept) in elsewhere.items():
        if kept:
            raise UserError(
                f"a dry run counts what lies on the device, and {what} keeps a part elsewhere; add {mend} to run dry "
                "without"
            )
    if cluster.device == "cpu" or config.precision in ("fp32", "float64", "fp16"):
        what = "CPUs" if cluster.device == "cpu" else f"precision: {config.precision}"
        raise UserError(
            f"a dry run has no values, and with {what} experts run one by one, by values; give --gpus GPUs, and "
            "add precision=bf16 or precision=fp8"
        )
    cluster.computes(config)
    config = _short(config, cluster)
    layout = Layout(config, cluster.count, "cuda")
    # a process for each: torch keeps a process group's meshes for as long as the process lives
    workers = min(len(layout.alike), os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(workers, maxtasksperchild=1) as pool:
        given = [(config, cluster, group) for group in layout.alike]
        ranks = tuple(pool.starmap(_one, given, chunksize=1))
    return DryRun(config, cluster, layout.slots, ranks)


def _short(config: RunConfig, cluster: Cluster) -> RunConfig:
    """The same with the shortest window that shows all: gradients that are made and added to, a full pipeline."""
    p = config.parallel
    slots = 2 if p.pp == 1 else p.stages
    sequences = slots * config.batch.micro_batch * (cluster.count // p.pp)
    sequences = min(config.batch.global_batch, sequences)
    batch = config.batch.model_copy(update={"global_batch": sequences, "ramp": None, "noise_scale": None})
    products = "reference" if config.fp8.products == "reference" else "triton"  # libraries ask for the GPU they run on
    fp8 = config.fp8.model_copy(update={"products": products})
    parallel = p.model_copy(update={"world_size": None})
    return config.model_copy(update={"batch": batch, "parallel": parallel, "fp8": fp8})


def _one(config: RunConfig, cluster: Cluster, alike: tuple[int, ...]) -> DryRank:
    """The first data rank of pipeline rank ``alike[0]``."""
    start = time.process_time()
    layout = Layout(config, cluster.count, "cuda")
    loss, fakes = DeepSeekLoss(config.model), FakeTensorMode(allow_non_fake_inputs=True)
    with _ranks(layout, alike[0]) as ranks:
        engine = _FakeEngine(fakes, config, ranks, loss)
        with fakes, _Operators() as operators:
            _without_values(engine, layout)
            accumulator = MoEAccumulator(
                engine.model,
                engine.optimizer,
                loss=loss,
                balance=layout.balance,
                max_norm=config.optimizer.max_norm,
                groups=ranks.groups,
                window_order="counting_pass" if config.counts_first else "forwards_first",
                device=ranks.device,
                pipeline=engine.pipeline,
                owner=engine.owner,
            )
            _first_step(engine)
            operators.bytes.clear()
            memory = TensorMemory(training_kinds(engine.model, engine.optimizer))
            with memory:
                report = accumulator.step(_window(layout))
        peak, by = memory.peak, memory.peak_by
        memory.kinds.clear()  # nothing asks the model what it holds while it goes
    counted = {kind: calls.bytes for kind, calls in report.traffic.items()}
    planned = {flow.kind: flow.whole for flow in traffic(layout, cluster, alike[0])}
    return DryRank(
        rank=alike[0],
        alike=alike,
        peak=peak,
        by=by,
        planned=None if layout.split else rank_memory(layout, alike[0]),
        traffic={kind: (counted.get(kind, 0), planned.get(kind, 0.0)) for kind in (*PLANNED, *counted)},
        wire=dict(operators.bytes),
        seconds=time.process_time() - start,
        resident=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


class _FakeEngine(NativeEngine):
    """Spread like any other; its memory is fake."""

    def __init__(self, fakes: FakeTensorMode, *args: Any) -> None:
        self.fakes = fakes
        super().__init__(*args)

    def materialise(self, config: RunConfig, ranks: Ranks, weights: Weights) -> None:
        with self.fakes:
            self.model.to_empty(device=ranks.device)


@contextmanager
def _ranks(layout: Layout, stage: int) -> Iterator[Ranks]:
    """This process as one of the layout's ranks; collectives return at once and change nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    p = layout.config.parallel
    rank = stage * layout.data_world
    device = torch.device("cpu")
    alone = layout.world == 1 and not needs_group(layout.config.precision, p)
    if alone:
        yield Ranks(rank, layout.world, device, mesh=None, stands_for=torch.device("cuda"))
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    try:
        need = needs_group(layout.config.precision, p)
        made = meshes("cpu", layout.world, dp_replicate=p.dp_replicate, ep=p.ep, pp=p.pp, need_group=need)
        yield Ranks(rank, layout.world, device, *made, stands_for=torch.device("cuda"))
    finally:
        dist.destroy_process_group()


def _without_values(engine: NativeEngine, layout: Layout) -> None:
    """Replaces what reads values: the sizes of what travels to experts, and a kernel's choice of its scratch space."""
    for module in engine.model.modules():
        if isinstance(module, MLA):
            module.attention = FusedAttention()
        elif isinstance(module, MoE):
            sends = module.dispatcher if isinstance(module.dispatcher, AllToAllDispatcher) else None
            module.dispatcher = even_dispatcher(layout.config.model, layout.kind, over=sends)


def _first_step(engine: NativeEngine) -> None:
    """The optimizer's states are there from the first step on."""
    for p in engine.model.parameters():
        p.grad = torch.zeros_like(p)
    engine.optimizer.step()
    engine.optimizer.zero_grad(set_to_none=True)


def _window(layout: Layout) -> Window:
    config = layout.config
    names = ["input_ids", "labels"] + ["document_ids"] * config.data.document_mask
    shape = layout.rows, config.data.seq_len
    return Window({name: torch.zeros(shape, dtype=torch.int64) for name in names} for _ in range(layout.slots))


class _Operators(TorchDispatchMode):
    """Counts the bytes of the whole tensors that collectives work on, as ``Traffic`` does, and answers for values."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, int] = defaultdict(int)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented
        if func is torch.ops.aten._local_scalar_dense.default:
            return False if args[0].dtype == torch.bool else 1.0 if args[0].is_floating_point() else 1
        if func.namespace == "c10d" and func._opname not in ("recv_", "barrier"):
            # inputs come second where there is an output; what is gathered is counted whole
            first = func._opname in ("allreduce_", "_allgather_base_", "send", "broadcast_")
            tensors = args[0] if first else args[1]
            self.bytes[func._opname] += sum(x.numel() * x.element_size() for x in _flat(tensors))
        return func(*args, **(kwargs or {}))


def _flat(tensors: Tensor | list[Tensor]) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else tensors
