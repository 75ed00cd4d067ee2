"""``verify``: shows on somebody's own config that the layout changes nothing.

The config's step (its model made small, its losses, its balance scope) is taken by one process with one big batch, and
then by every layout that this version offers here: other micro-batches, windows with empty ones, both kinds of
recompute, several ranks under FSDP2 and under DeepSpeed's ZeRO. A table says how far each is from the first. The batch
is awkward on purpose: prompts without a loss, a row without any label, padding, packed documents.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.parallel import DistributedDataParallel

from moetrain.accumulate import Balance, MoEAccumulator, StepReport, Window
from moetrain.config import ModelConfig, RunConfig
from moetrain.config.run import SPLIT_BACKWARD, DeepSpeedConfig, ParallelConfig, PipelineSchedule
from moetrain.engine import DeepSpeedEngine
from moetrain.engine.pipeline import Pipeline
from moetrain.model import DeepSeek, DeepSeekLoss
from moetrain.parallel.plan import spread
from moetrain.parallel.ranks import Ranks, meshes

ROWS, TOKENS, STEPS = 8, 48, 2
#: relative bounds: sums in another order are the only difference, 2^-53 or 2^-24 each, through two steps
BOUND = {"float64": 1e-11, "float32": 2e-4}
EXACT = ("sequence", "previous", "window")


@dataclass(frozen=True)
class Layout:
    """How the batch is spread: rows of each micro-batch (0 = empty), by data rank."""

    name: str
    cuts: tuple[tuple[int, ...], ...]
    recompute: Literal["none", "selective", "full"] = "none"
    reduce: Literal["window", "micro_batch"] = "window"
    ep: int = 1
    copies: int = 1
    schedule: PipelineSchedule | None = None
    order: Literal["forwards_first", "counting_pass"] = "forwards_first"
    ddp: bool = False
    zero: Literal[0, 1, 2, 3] = 0  # DeepSpeed's stage
    host: bool = False

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(
            recompute=self.recompute,
            reduce=self.reduce,
            ep=self.ep,
            dp_replicate=self.copies,
            pp=2 if self.schedule else 1,
            schedule=self.schedule or "1f1b",
            reshard_after_forward=self.schedule not in SPLIT_BACKWARD,
        )

    @property
    def world(self) -> int:
        return len(self.cuts) * self.parallel.pp


REFERENCE = Layout("one process, one batch", ((8,),))
LAYOUTS = (
    Layout("micro-batches of 4", ((4, 4),)),
    Layout("micro-batches of 1", ((1,) * 8,)),
    Layout("unequal, two of them empty", ((1, 0, 5, 0, 2),)),
    Layout("micro-batches of 2, recompute", ((2,) * 4,), recompute="full"),
    Layout("micro-batches, recompute selective", ((2,) * 4,), recompute="selective"),
    Layout("micro-batches of 2, counting pass", ((2,) * 4,), order="counting_pass"),
    Layout("2 ranks, DDP", ((2, 2), (3, 1)), ddp=True),
    Layout("2 ranks, FSDP2", ((2, 2), (3, 1))),
    Layout("2 ranks, FSDP2, one with a row", ((4, 3), (1, 0)), recompute="full"),
    Layout("2 ranks, FSDP2, reduced each time", ((2, 2), (3, 1)), reduce="micro_batch"),
    Layout("4 ranks, FSDP2, one with nothing", ((2, 1), (1, 1), (2, 1), (0, 0))),
    Layout("2 ranks, experts spread over both", ((2, 2), (3, 1)), ep=2),
    Layout("4 ranks, experts over 2, recompute", ((2, 1), (1, 1), (2, 1), (0, 0)), recompute="full", ep=2),
    Layout("4 ranks, 2 copies, experts over 2", ((2, 1), (1, 1), (2, 1), (0, 0)), ep=2, copies=2),
    Layout("2 stages, 1F1B, recompute", ((1, 0, 5, 2),), recompute="full", schedule="1f1b"),
    Layout("2 ranks, FSDP2, recompute selective", ((2, 2), (3, 1)), recompute="selective"),
    Layout("2 stages, recompute selective", ((1, 0, 5, 2),), recompute="selective", schedule="gpipe"),
    Layout("2 stages of 2 data ranks, GPipe", ((2, 2), (3, 1)), schedule="gpipe"),
    Layout("2 stages, experts over 2, DualPipeV", ((2, 2), (3, 1)), ep=2, schedule="dualpipev"),
)
#: in fp32 whatever is asked for: DeepSpeed's master weights and reductions are fp32 at most
ZERO_LAYOUTS = (
    Layout("2 ranks, ZeRO 1", ((2, 2), (3, 1)), zero=1),
    Layout("2 ranks, ZeRO 2 on the host", ((2, 2), (3, 1)), zero=2, host=True),
    Layout("2 ranks, ZeRO 2, experts over 2", ((2, 2), (3, 1)), zero=2, ep=2),
    Layout("2 ranks, ZeRO 3, recompute", ((2, 2), (3, 1)), zero=3, recompute="full"),
    Layout("2 ranks, ZeRO 3 on the host", ((4, 3), (1, 0)), zero=3, host=True),
    Layout("4 ranks, ZeRO 1, experts over 2", ((2, 1), (1, 1), (2, 1), (0, 0)), zero=1, ep=2),
    Layout("4 ranks, ZeRO 3", ((2, 1), (1, 1), (2, 1), (0, 0)), zero=3),
)


def verify(config: RunConfig, *, dtype: str = "float64") -> bool:
    """Prints the table; returns whether every layout that has to be exact is.

    Args:
        config: its model is made small, its balance losses, MTP weight and clipping are taken as they are.
        dtype: ``float64`` or ``float32``.
    """
    small = scaled(config.model)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a file has room for the table
    console.print(
        f"{config.name}: {small.model_type} with {sum(p.numel() for p in _meta(small).parameters()):,} parameters, "
        f"{ROWS} rows of {TOKENS} tokens, {STEPS} steps, {dtype}"
    )
    scopes = [config.balance.scope, *(scope for scope in EXACT if scope != config.balance.scope)]
    table = Table()
    for column in ("scope", "layout", "loss", "gradients", "norm", "counts", "bias", "parameters", ""):
        table.add_column(column, no_wrap=True)
    held = True
    taken = {}
    layouts = LAYOUTS + (ZERO_LAYOUTS if find_spec("deepspeed") else ())
    with Progress(console=console, transient=True) as progress:
        for layout in progress.track((REFERENCE, *layouts), description="layouts"):
            taken[layout.name] = _take(layout, small, config, scopes, dtype)
            if not console.is_terminal:
                console.print(f"{layout.name}: taken")
    for scope in scopes:
        want = taken[REFERENCE.name][0][scope]
        for layout in layouts:
            row, worst = _compare([rank[scope] for rank in taken[layout.name]], want)
            exact = scope in EXACT
            good = worst <= BOUND["float32" if layout.zero else dtype]
            held &= good or not exact
            holds = "holds, in fp32" if layout.zero and dtype == "float64" else "holds"
            verdict = holds if good else ("BROKEN" if exact else "approximate, as documented")
            table.add_row(scope, layout.name, *row, verdict)
    console.print(table)
    if layouts == LAYOUTS:
        console.print("DeepSpeed is not installed: its layouts are left out")
    console.print(f"the law {'holds' if held else 'is BROKEN'} (bound {BOUND[dtype]:g}, relative)")
    return held


def scaled(model: ModelConfig) -> ModelConfig:
    """The same architecture in a size that a test takes: widths and counts cut down, every feature kept."""
    per_group = max(2, -(-model.num_experts_per_tok // model.topk_group))
    experts = min(model.n_routed_experts, max(8, model.n_group * per_group))
    experts -= experts % model.n_group
    if experts % 2:  # so that expert-parallel ranks can share them
        experts *= 2
    heads = min(model.num_attention_heads, 4)
    small = {
        "vocab_size": min(model.vocab_size, 256),
        "hidden_size": min(model.hidden_size, 64),
        "intermediate_size": min(model.intermediate_size, 96),
        "moe_intermediate_size": min(model.moe_intermediate_size, 32),
        "num_hidden_layers": min(model.num_hidden_layers, 4),
        "first_k_dense_replace": min(model.first_k_dense_replace, 2),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "n_routed_experts": experts,
        "q_lora_rank": None if model.q_lora_rank is None else min(model.q_lora_rank, 32),
        "kv_lora_rank": min(model.kv_lora_rank, 32),
        "qk_nope_head_dim": min(model.qk_nope_head_dim, 16),
        "qk_rope_head_dim": min(model.qk_rope_head_dim, 8),
        "v_head_dim": min(model.v_head_dim, 16),
        "max_position_embeddings": max(model.max_position_embeddings, TOKENS),
        "initializer_range": 0.1,  # so that routing differs from token to token
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return ModelConfig(**(model.model_dump() | small))


def _meta(config: ModelConfig) -> DeepSeek:
    with torch.device("meta"):
        return DeepSeek(config)


def _batch(vocabulary: int) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (ROWS, TOKENS), generator=g)
    mask = torch.ones(ROWS, TOKENS, dtype=torch.int64)
    mask[2, TOKENS // 2 :], mask[5, 3:] = 0, 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[0, : TOKENS - 3], labels[4] = -100, -100
    documents = (torch.rand(ROWS, TOKENS, generator=g) < 0.06).cumsum(1)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, "document_ids": documents}


def _window(layout: Layout, rank: int, vocabulary: int) -> Window:
    whole = _batch(vocabulary)
    first = sum(map(sum, layout.cuts[:rank]))
    items = []
    for size in layout.cuts[rank]:
        if size:
            items.append({key: value[first : first + size] for key, value in whole.items()})
        else:
            items.append({k: torch.full_like(v[:1], -100 if k == "labels" else 0) for k, v in whole.items()})
        first += size
    return Window(items)


def _take(
    layout: Layout, model: ModelConfig, config: RunConfig, scopes: list[str], dtype: str
) -> list[dict[str, dict[str, Any]]]:
    """What every rank of a layout found, by scope."""
    world = layout.world
    with tempfile.TemporaryDirectory() as folder:
        if world == 1:
            _rank(0, layout, model, config, scopes, dtype, folder)
        else:
            start_processes(_rank, (layout, model, config, scopes, dtype, folder), nprocs=world, start_method="spawn")
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(world)]


def _rank(
    rank: int, layout: Layout, shape: ModelConfig, config: RunConfig, scopes: list[str], dtype: str, folder: str
) -> None:
    world = layout.world
    # gathering what lies on several meshes takes several collectives, and torch says so each time
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    ranks = Ranks(rank, world, torch.device("cpu"), None)
    if world > 1:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
        p = layout.parallel
        spread_over = meshes("cpu", world, dp_replicate=p.dp_replicate, ep=p.ep, pp=p.pp, need_group=p.pp == 1)
        ranks = Ranks(rank, world, torch.device("cpu"), *spread_over)
    torch.save(
        {scope: _steps(layout, ranks, shape, config, scope, dtype) for scope in scopes}, Path(folder, f"{rank}.pt")
    )
    if world > 1:
        dist.destroy_process_group()


def _steps(
    layout: Layout, ranks: Ranks, shape: ModelConfig, config: RunConfig, scope: str, dtype: str
) -> dict[str, Any]:
    if layout.zero:
        return _zero_steps(layout, ranks, shape, config, scope)
    model = DeepSeek(shape)
    model.init_weights(config.seed)
    number = torch.float64 if dtype == "float64" else torch.float32
    model.to(number)
    loss = DeepSeekLoss(shape, config.mtp.weight.at(0))
    wrapped: nn.Module = model
    pipeline = None
    if layout.ddp:
        wrapped = DistributedDataParallel(model, broadcast_buffers=False)
    else:
        spread(model, layout.parallel, "float64" if dtype == "float64" else "fp32", ranks)
        if ranks.pipe is not None:
            pipeline = Pipeline(model, loss, layout.parallel, ranks, dtype=number)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients: dict[str, Tensor] = {}
    optimizer.register_step_pre_hook(
        lambda *_: gradients.update({n: _whole(p.grad) for n, p in model.named_parameters() if p.grad is not None})
    )
    accumulator = MoEAccumulator(
        wrapped,
        optimizer,
        loss=loss,
        balance=_balance(config, scope),
        max_norm=config.optimizer.max_norm,
        groups=ranks.groups,
        window_order=layout.order,
        reduce=layout.reduce,
        pipeline=pipeline,
    )
    window = _window(layout, ranks.data_rank, shape.vocab_size)
    reports = [accumulator.step(window) for _ in range(STEPS)]
    return _found(reports, gradients, {n: _whole(p) for n, p in model.named_parameters()}, model)


def _found(
    reports: Sequence[StepReport], gradients: dict[str, Tensor], parameters: dict[str, Tensor], model: nn.Module
) -> dict[str, Any]:
    return {
        "loss": torch.stack([r.total for r in reports]),
        "norm": torch.stack([r.grad_norm.double() for r in reports]),
        "counts": torch.stack([r.load for r in reports]),
        "gradients": gradients,
        "parameters": parameters,
        "bias": {n: b.clone() for n, b in model.named_buffers()},
    }


def _zero_steps(layout: Layout, ranks: Ranks, shape: ModelConfig, config: RunConfig, scope: str) -> dict[str, Any]:
    place: Literal["cpu", "none"] = "cpu" if layout.host else "none"
    config = config.model_copy(
        update={
            "model": shape,
            "engine": "deepspeed",
            "precision": "fp32",
            "parallel": layout.parallel,
            "init_from": None,
            "optimizer": config.optimizer.model_copy(update={"weight_decay": 0.0}),
            "deepspeed": DeepSpeedConfig(
                zero_stage=layout.zero or 3,
                offload_optimizer=place,
                offload_parameters=place if layout.zero == 3 else "none",
            ),
        }
    )
    engine = DeepSpeedEngine(config, ranks, optimizer=lambda groups: torch.optim.SGD(groups, lr=0.1))
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad  # after it was told about the device

    module: Any = engine.model.module

    def whole(value: Tensor, p: nn.Parameter) -> Tensor:
        """Of experts that are spread, each rank has its own."""
        if ranks.expert_mesh is None or getattr(p, "allreduce", True):
            return value.detach().clone()
        group = ranks.expert_mesh["ep"].get_group()
        parts = [torch.empty_like(value) for _ in range(group.size())]
        dist.all_gather(parts, value.detach().contiguous(), group=group)
        return torch.cat(parts)

    gradients: dict[str, Tensor] = {}

    def keep(_: float) -> None:
        gradients.update({n: whole(safe_get_full_grad(p), p) for n, p in module.named_parameters()})

    accumulator = MoEAccumulator(
        engine.model,
        engine.optimizer,
        loss=DeepSeekLoss(shape, config.mtp.weight.at(0)),
        balance=_balance(config, scope),
        max_norm=config.optimizer.max_norm,
        groups=ranks.groups,
        window_order="counting_pass" if layout.zero == 3 else "forwards_first",
        skip_if=keep,
        owner=engine.owner,
    )
    window = _window(layout, ranks.data_rank, shape.vocab_size)
    reports = [accumulator.step(window) for _ in range(STEPS)]
    gradients = {n: g * engine.owner.factor for n, g in gradients.items()}  # clipped, as the others are
    return _found(
        reports, gradients, {n: whole(safe_get_full_fp32_param(p), p) for n, p in module.named_parameters()}, module
    )


def _balance(config: RunConfig, scope: str) -> Balance:
    """The config's losses; where it has none, one is added, or a scope would have nothing to show."""
    b = config.balance
    losses = b.losses | {"alpha": b.alpha or 0.01}
    return Balance(scope=scope, bias_rate=b.bias_rate.at(0), zero_centred=b.zero_centred, **losses)  # type: ignore[arg-type]


def _whole(x: Tensor) -> Tensor:
    x = x.detach()
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).clone()


def _compare(got: list[dict[str, Any]], want: dict[str, Any]) -> tuple[list[str], float]:
    """Columns of the table, and the worst relative difference of any rank."""
    columns = []
    worst = 0.0
    for key in ("loss", "gradients", "norm", "counts", "bias", "parameters"):
        apart = max(_apart(rank[key], want[key]) for rank in got)
        if isinstance(want[key], dict) and set().union(*(rank[key] for rank in got)) != want[key].keys():
            apart = float("inf")  # something is nowhere
        worst = max(worst, apart)
        exact = key in ("counts", "bias")
        columns.append(("equal" if apart == 0 else f"off by {apart:.0e}") if exact else f"{apart:.1e}")
    return columns, worst


def _apart(a: Any, b: Any) -> float:
    if isinstance(b, dict):  # a stage has some of the names
        return max((_apart(a[name], b[name]) for name in a), default=0.0)
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-300)) if b.any() else float(a.any())
