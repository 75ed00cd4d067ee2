"""The engine for models beyond the GPUs' memory: DeepSpeed's ZeRO, with states on the host or on a drive.

DeepSpeed decides where parameters, gradients and optimizer states lie, reduces gradients and steps. What makes a step
exact stays ours: the window and its one end, sums where DeepSpeed averages, the one norm over everything, the verdict
before anything moves. So of its own window, clipping and loss scaling all are switched off: a caller-owned boundary
(``managed_gradient_accumulation: false``), ``gradient_clipping: 0`` (absent, it means 1), a constant loss scale.

ZeRO 1 reduces gradients when the window ends, ZeRO 2 and 3 at each micro-batch. Master weights and moments are fp32 at
most, which is DeepSpeed's limit: there is no float64 here.
"""

from __future__ import annotations

import importlib
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moetrain.config.run import DeepSpeedConfig, RunConfig
from moetrain.engine.filling import fill
from moetrain.engine.host import give_back_host_memory
from moetrain.engine.zero_owner import ZeroOwner
from moetrain.engine.zero_settings import settings_of, taken_by
from moetrain.engine.zero_state import ZeroState
from moetrain.errors import UserError
from moetrain.model import DeepSeek, FreshWeights, Weights
from moetrain.model.moe import RoutedExperts
from moetrain.optim import build_adamw, parameter_groups
from moetrain.parallel.plan import dtypes, spread
from moetrain.parallel.ranks import Ranks


class DeepSpeedEngine:
    """See ``moetrain.engine.protocol.Engine``.

    Args:
        config: the run; ``config.deepspeed`` says the ZeRO stage and what is kept elsewhere.
        ranks: this process among the run's.
        weights: what the model starts from; default: fresh ones from the run's seed.
        optimizer: makes it from parameter groups; default: AdamW as configured.

    Raises:
        UserError: DeepSpeed is not installed, or lacks what the config asks for.
    """

    pipeline = None

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        *,
        weights: Weights | None = None,
        optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer] | None = None,
    ) -> None:
        deepspeed = _import(ranks.device)
        if config.precision == "fp16" and not takes_fp16():
            raise UserError(
                f"precision: fp16 with engine: deepspeed needs fp16 units, which this {ranks.device.type.upper()} "
                "lacks: use precision=bf16, or engine=native"
            )
        stored, computed = dtypes(config.precision, ranks.device)
        zero = config.deepspeed
        settings = settings_of(config, ranks)
        _join(deepspeed)
        taken = taken_by(deepspeed, settings, zero.json_file)
        if zero.nvme_path is not None and "nvme" in (zero.offload_optimizer, zero.offload_parameters):
            _need_drive(zero.nvme_path)
            give_back_host_memory()

        weights = weights or FreshWeights(config.model.initializer_range, config.seed)
        with torch.device("meta"):  # a rank has memory only for what is its own
            model = DeepSeek(config.model).to(stored)
        shapes = {name: p.shape for name, p in model.named_parameters()}
        applied, fp8 = spread(
            model,
            config.parallel,
            config.precision,
            ranks,
            seq_len=config.data.seq_len,
            fp8_config=config.fp8,
            experts=config.experts,
            sharded_by="zero",
            weights_stay=zero.zero_stage < 3,
        )
        expert_rank = 0 if ranks.expert_mesh is None else ranks.expert_mesh["ep"].get_local_rank()
        if zero.zero_stage < 3:
            model.to_empty(device=ranks.device)
            fill(model, weights, shapes=shapes, part=expert_rank)
        if ranks.expert_mesh is not None:
            _mark_experts(model, ranks)
        # ZeRO 3 takes the parameters' shapes, which decide who decays
        names = {p: name for name, p in model.named_parameters()}
        decay = config.optimizer.weight_decay
        groups = [([names[p] for p in g["params"]], g["weight_decay"]) for g in _groups(model, decay)]
        masters: dict[str, Tensor] = {}
        if zero.zero_stage == 3:
            masters = _partition(deepspeed, model, weights, settings, computed, ranks)
        elif stored != computed:
            masters = {name: p.detach() for name, p in model.named_parameters()}
        model.train()

        given = _with_parameters(model, groups)
        basic, how = (optimizer(given), "optimizer: as given") if optimizer else _optimizer(given, config, ranks)
        wrapped = _wrapped(deepspeed, model, basic, settings, taken, experts=ranks.expert_mesh is not None)
        sharded = wrapped.optimizer
        self.model: nn.Module = wrapped
        self.optimizer: Any = sharded
        sharded.override_loss_scale(1.0)
        sharded.named_state = ZeroState(
            model,
            sharded,
            [names for names, _ in groups],
            stage=zero.zero_stage,
            expert_parts=config.parallel.ep,
            expert_part=expert_rank,
        )
        sharded.named_state.fill(masters)
        self.owner = ZeroOwner(wrapped, sharded, ranks, zero, fp8)
        self.applied: Sequence[str] = [*applied, _words(zero, ranks), how]


def _import(device: torch.device) -> Any:
    os.environ["DS_ACCELERATOR"] = device.type  # or it takes a GPU where there is one, and warns where there is none
    os.environ.setdefault("LOCAL_RANK", "0")
    try:
        import deepspeed
        from deepspeed.utils.logging import logger
    except ImportError as error:
        raise UserError(
            f"engine: deepspeed needs DeepSpeed ({error}); pip install 'moetrain[deepspeed]', or use engine=native"
        ) from error
    logger.setLevel(logging.ERROR)
    # it calls what torch has renamed
    warnings.filterwarnings("ignore", message=r".*_tensor` is deprecated", category=FutureWarning)
    return deepspeed


def takes_fp16() -> bool:
    """Whether DeepSpeed takes fp16 here: of CPUs, some."""
    accelerator: Any = importlib.import_module("deepspeed.accelerator").get_accelerator()
    return bool(accelerator.is_fp16_supported())


def _join(deepspeed: Any) -> None:
    """DeepSpeed takes the processes there are."""
    # On CPUs it would compile a communicator of its own first (a minute, and a process that is killed meanwhile leaves
    # a lock that hangs each later start); gloo is what the run talks over already.
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False)


def _partition(
    deepspeed: Any,
    model: DeepSeek,
    weights: Weights,
    settings: dict[str, Any],
    computed: torch.dtype,
    ranks: Ranks,
) -> dict[str, Tensor]:
    """Gives DeepSpeed this rank's part of each parameter, and no rank ever has more of one than its part's rows.

    Returns:
        This rank's part of each parameter in the precision of the master weights, where that is not the computation's.
    """
    parts: dict[str, Tensor] = {}
    offload = settings["zero_optimization"].get("offload_param", {})
    if offload.get("device") == "nvme":  # a buffer holds any parameter's part
        offload["buffer_size"] = max(-(-p.numel() // ranks.data_world) for p in model.parameters())
    shards = _own_parts(deepspeed)(config_dict_or_path=settings, dtype=computed)
    for prefix, module in model.named_modules():
        for key, p in list(module.named_parameters(recurse=False)):
            name = f"{prefix}.{key}"
            part = _part(weights, name, p, ranks)
            if computed != p.dtype:
                parts[name] = part[: max(0, p.numel() - ranks.data_rank * len(part))].clone()
            empty = torch.empty((), dtype=computed, device=ranks.device).expand(p.shape)  # the shape alone
            held = nn.Parameter(empty, requires_grad=p.requires_grad)
            setattr(module, key, held)
            shards.take(held, part.to(computed))
        for key, buffer in module.named_buffers(recurse=False):
            rows = torch.empty_like(buffer, device=ranks.device)
            weights.fill(f"{prefix}.{key}", buffer.shape, 0, rows)
            setattr(module, key, rows)
    return parts


def _part(weights: Weights, name: str, p: Tensor, ranks: Ranks) -> Tensor:
    """This rank's elements of ``p`` in ZeRO 3, flat, padded with zeros to the size that every rank's part has.

    They may be a view of the rows that they lie in.
    """
    size, width = -(-p.numel() // ranks.data_world), p[0].numel()
    start = min(size * ranks.data_rank, p.numel())
    end = min(start + size, p.numel())
    if start == end:
        return torch.zeros(size, dtype=p.dtype)
    first = start // width
    rows = torch.empty(-(-end // width) - first, *p.shape[1:], dtype=p.dtype)
    weights.fill(name, p.shape, first, rows)
    own = rows.view(-1)[start - first * width : end - first * width]
    return own if len(own) == size else torch.nn.functional.pad(own, (0, size - len(own)))


def _own_parts(deepspeed: Any) -> Any:
    """``zero.Init`` that takes a rank's own part: DeepSpeed's broadcasts the whole parameter first, then cuts it."""

    class OwnParts(deepspeed.zero.Init):  # type: ignore[misc]
        alone = False

        def take(self, p: Any, part: Tensor) -> None:
            """``p`` says the shape; ``part`` is put where DeepSpeed's own partition puts one of one."""
            self._convert_to_deepspeed_param(p)
            whole, self.alone = p.ds_numel, True
            p.data, p.ds_numel = part, part.numel()
            p.partition()
            p.ds_numel, self.alone = whole, False
            p.ds_numel_aligned = self._aligned_size(p)
            p.data = p.data.to(self.local_device)

        def _partition_world_size(self, p: Any) -> int:
            return 1 if self.alone else int(super()._partition_world_size(p))

        def _partition_rank(self, p: Any) -> int:
            return 0 if self.alone else int(super()._partition_rank(p))

    return OwnParts


def _mark_experts(model: DeepSeek, ranks: Ranks) -> None:
    """Tells DeepSpeed which parameters are one expert group's own, in its words."""
    from deepspeed.utils import groups

    assert ranks.expert_mesh is not None
    size = ranks.expert_mesh["ep"].size()
    name = f"ep_size_{size}"
    if name not in groups._get_expert_data_parallel_group_dict():
        groups._create_expert_and_data_parallel(size)
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            for p in module.parameters():
                p.allreduce, p.group_name = False, name  # type: ignore[attr-defined]


def _wrapped(
    deepspeed: Any, model: nn.Module, optimizer: Any, settings: dict[str, Any], taken: Any, *, experts: bool
) -> Any:
    """DeepSpeed's engine, told that parameters differ between ranks: it looks for layers of its own class to learn."""

    class Engine(deepspeed.DeepSpeedEngine):  # type: ignore[misc]
        def _configure_optimizer(self, *given: Any) -> None:
            self.has_moe_layers = experts
            super()._configure_optimizer(*given)

    return Engine(args=None, model=model, optimizer=optimizer, config=settings, config_class=taken)


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """``parameter_groups``, with experts that differ between ranks apart."""
    apart = []
    for group in parameter_groups(model, weight_decay):
        for shared in (True, False):
            own = [p for p in group["params"] if getattr(p, "allreduce", True) == shared]
            if own:
                apart.append({**group, "params": own})
    return apart


def _with_parameters(model: nn.Module, groups: Sequence[tuple[list[str], float]]) -> list[dict[str, Any]]:
    parameters = dict(model.named_parameters())
    given = []
    for names, decay in groups:
        group: dict[str, Any] = {"params": [parameters[name] for name in names], "weight_decay": decay}
        first = group["params"][0]
        if not getattr(first, "allreduce", True):
            group |= {"moe": True, "name": first.group_name}
        given.append(group)
    return given


def _optimizer(given: list[dict[str, Any]], config: RunConfig, ranks: Ranks) -> tuple[torch.optim.Optimizer, str]:
    o = config.optimizer
    fits = o.moments == "fp32" and config.deepspeed.cpu_adam != "torch"  # it has no others
    if config.deepspeed.offload_optimizer != "none" and fits:
        asked = config.deepspeed.cpu_adam == "deepspeed"
        if asked or ranks.device.type == "cuda":
            built = _cpu_adam(needed=asked)
            if built is not None:
                return built(given, lr=o.lr, betas=o.betas, eps=o.eps), "optimizer: DeepSpeed's CPU Adam"
    return build_adamw(given, lr=o.lr, betas=o.betas, eps=o.eps, moments=o.moments)


def _cpu_adam(*, needed: bool) -> Any:
    """DeepSpeed's AdamW for states on the host, compiled at the first use; None where that cannot be."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam
    from deepspeed.ops.op_builder import CPUAdamBuilder

    try:
        _compile(CPUAdamBuilder(), "deepspeed.cpu_adam: deepspeed", "deepspeed.cpu_adam=torch")
    except CannotCompile:
        if needed:
            raise
        return None
    return DeepSpeedCPUAdam


class CannotCompile(UserError):
    """The compiler, or something it needs, is missing."""


def _compile(builder: Any, what: str, instead: str) -> None:
    """At the first use, in minutes. A process that is killed meanwhile leaves a lock that every later one waits for."""
    from torch.utils.cpp_extension import _get_build_directory

    try:
        lock = Path(_get_build_directory(builder.name, verbose=False), "lock")
        if lock.exists() and time.time() - lock.stat().st_mtime > 1800:
            raise UserError(f"{lock} was left by a process that ended while it compiled: remove it, and start again")
        builder.load(verbose=False)
    except UserError:
        raise
    except Exception as error:  # whatever a compiler, or the lack of one, brings about
        first = str(error).strip().splitlines()[0]
        raise CannotCompile(
            f"{what} cannot be compiled here ({first}); install g++ and ninja, or use {instead}"
        ) from error


def _need_drive(path: Path) -> None:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UserError(
            f"deepspeed.nvme_path: {path} cannot be written to ({error.strerror}): name a folder on the drive"
        ) from error
    if not AsyncIOBuilder().is_compatible(verbose=False):
        raise UserError(
            "deepspeed: offload to nvme needs libaio, which is not here: on Debian `apt install libaio-dev`, or use "
            "offload to cpu"
        )
    _compile(AsyncIOBuilder(), "deepspeed: what reads and writes the drive", "offload to cpu")


def _words(zero: DeepSpeedConfig, ranks: Ranks) -> str:
    sharded = {1: "optimizer states", 2: "optimizer states and gradients", 3: "parameters, gradients and states"}
    away = [
        f"{what} on {'the host' if place == 'cpu' else place}"
        for what, place in (("optimizer", zero.offload_optimizer), ("parameters", zero.offload_parameters))
        if place != "none"
    ]
    reduced = "window" if zero.zero_stage == 1 else "micro-batch"
    return (
        f"DeepSpeed ZeRO {zero.zero_stage} over {ranks.data_world} ranks: {sharded[zero.zero_stage]} sharded"
        f"{''.join(', ' + each for each in away)}, gradients summed each {reduced}"
    )
