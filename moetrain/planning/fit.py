"""Does the run fit here? Asked before anything is allocated, so that 671B on a laptop ends in a sentence.

First a lower bound that costs nothing: parameters, gradients and AdamW's two moments, over the ranks there are. Then,
where it is not plain that the rest fits, the plan (``moetrain.planning.plan``), which knows activations and buffers.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from moetrain.config import RunConfig
from moetrain.config.support import unsupported
from moetrain.errors import UserError
from moetrain.parallel import deep_ep
from moetrain.planning.hardware import GIB, TABLE, Cluster
from moetrain.planning.states import States, rank_states


@dataclass(frozen=True)
class Machine:
    """What a process finds: CUDA devices and free bytes of each, host bytes, ranks started here and in all, bytes free
    on the drive that states are to lie on (None: nobody looked)."""

    gpus: int
    gpu_bytes: int
    host_bytes: int
    local_ranks: int
    ranks: int
    fp8: bool
    drive_bytes: int | None = None

    @staticmethod
    def here(drive: Path | None = None) -> Machine:
        """Look around; nothing is allocated. Ranks are those that torchrun or another launcher announces."""
        ranks = int(os.environ.get("WORLD_SIZE", "1"))
        local = int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks)))
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        index = int(os.environ.get("LOCAL_RANK", "0"))
        known = index < gpus
        return Machine(
            gpus=gpus,
            gpu_bytes=torch.cuda.mem_get_info(index)[0] if known else 0,
            host_bytes=host_memory(),
            local_ranks=local,
            ranks=ranks,
            fp8=known and torch.cuda.get_device_capability(index) >= (8, 9),
            drive_bytes=None if drive is None else _free(drive),
        )


def check(config: RunConfig, path: Path | None = None, machine: Machine | None = None, *, force: bool = False) -> None:
    """Raise UserError where ``config`` cannot run on ``machine`` (default: this one), saying what is missing.

    ``path`` is the file the config came from; where a ``smoke.yaml`` lies beside it, the sentence names that
    as the run that works here. ``force`` runs whatever memory is missing.
    """
    machine = machine or Machine.here(config.deepspeed.nvme_path if config.engine == "deepspeed" else None)
    name, ranks = str(path or config.name), config.parallel.world_size or machine.ranks
    # Where the number of processes is not the one asked for, the run is taken to be meant for this host.
    here = machine.local_ranks if machine.ranks == ranks else ranks
    on_gpu = config.device == "cuda" or (config.device == "auto" and machine.gpus > 0)
    size = rank_states(config, ranks)
    device, host = (size.device, size.host * here) if on_gpu else (0, (size.device + size.host) * here)

    lacks = []
    no_gpus = on_gpu and machine.gpus < here
    if no_gpus:
        memory = f" with {_gib(device)}{' each' if here > 1 else ''}" if device else ""
        lacks.append(f"{_count(here, 'CUDA GPU')}{memory} (here: {machine.gpus or 'none'})")
    elif on_gpu and device > machine.gpu_bytes and not force:
        lacks.append(f"{_gib(device)} on each GPU for {_KEPT} (here: {_gib(machine.gpu_bytes)})")
    elif on_gpu and config.precision == "fp8" and not machine.fp8:
        lacks.append("GPUs that compute in FP8 (here: older ones)")
    if host > machine.host_bytes and not force:
        lacks.append(f"{_gib(host)} of host memory for {_KEPT} (here: {_gib(machine.host_bytes)})")
    if machine.drive_bytes is not None and size.drive * here > machine.drive_bytes and not force:
        drive = f"{_gib(size.drive * here)} on the drive of deepspeed.nvme_path"
        lacks.append(f"{drive} for what is offloaded (here: {_gib(machine.drive_bytes)} free)")
    if lacks:
        mend = _instead(path, only_gpus=no_gpus and len(lacks) == 1)
        raise UserError(f"{name} needs {' and '.join(lacks)}{_not_yet(config)}{mend}")
    p = config.parallel
    if p.dispatch == "deep_ep" and not (on_gpu and config.precision in ("bf16", "fp8") and deep_ep.installed()):
        has = "is not installed" if deep_ep.installed() is False else "carries bf16 and FP8 between GPUs alone"
        raise UserError(f"parallel.dispatch: deep_ep, but DeepEP {has}; use parallel.dispatch=all_to_all")
    fixed = p.pp * p.dp_replicate
    if p.dp_shard not in (-1, machine.ranks // fixed) and ranks == machine.ranks:
        times = f" for each of {fixed} stages and copies" if fixed > 1 else ""
        raise UserError(
            f"parallel.dp_shard: {p.dp_shard} asks for {_count(p.dp_shard, 'process')}{times} and {machine.ranks} "
            "started; use parallel.dp_shard=-1 for as many as there are"
        )
    if ranks == machine.ranks and ranks % (fixed * p.ep):
        sizes = {"pp": p.pp, "dp_replicate": p.dp_replicate, "ep": p.ep}
        which = " times ".join(f"parallel.{key}: {size}" for key, size in sizes.items() if size > 1)
        raise UserError(
            f"{which} must divide the {_count(ranks, 'process')} that started: use "
            f"`torchrun --nproc_per_node {fixed * p.ep} -m moetrain --config {path or 'CONFIG'}`, or another split"
        )
    if ranks != machine.ranks:
        raise UserError(
            f"{name} was written for {_count(ranks, 'process')} and {machine.ranks} started: use "
            f"`torchrun --nproc_per_node {ranks} -m moetrain --config {path or 'CONFIG'}`, "
            "or parallel.world_size=null for any number"
        )
    if not force:
        _ask_plan(config, path, machine, size, "cuda" if on_gpu else "cpu")


_KEPT = "parameters, gradients and AdamW states"
#: seconds in which changes that would make a run fit are looked for
PATIENCE = 30.0


def _ask_plan(config: RunConfig, path: Path | None, machine: Machine, size: States, device: str) -> None:
    """Refuse what the plan says does not fit, with the nearest change that does."""
    if guess(config, machine.ranks, size) * (1 if device == "cuda" else machine.local_ranks) < (
        machine.gpu_bytes if device == "cuda" else machine.host_bytes
    ):
        return  # a plan costs seconds, which a small run would notice
    from moetrain.planning.plan import make_plan, nearest
    from moetrain.planning.show import verdict

    kind = TABLE["H100" if device == "cuda" else "CPU"]  # its speed orders the changes; its memory is the machine's
    hardware = dataclasses.replace(
        kind,
        memory=machine.gpu_bytes,
        host_memory=machine.host_bytes,
        drives=sys.maxsize if machine.drive_bytes is None else machine.drive_bytes,
        fp8=kind.fp8 if machine.fp8 else 0.0,
        per_node=machine.local_ranks,
    )
    try:
        plan = make_plan(config, Cluster(hardware, machine.ranks))
    except UserError:
        return  # no plan covers this layout yet; the lower bound has to do
    if plan.fits:
        return
    found = nearest(plan, PATIENCE)
    mend = f"; add {found} to the command" if found else _instead(path, only_gpus=False)
    raise UserError(f"{path or config.name} {verdict(plan)}{mend}, or --force to try it anyway")


def guess(config: RunConfig, ranks: int, size: States) -> int:
    """Bytes that a rank stays below: twice its states, and more for every token that is in flight than any operator of
    a block keeps. Where even that is there, no plan is needed."""
    model, p, batch = config.model, config.parallel, config.batch
    data = max(1, ranks // p.pp)
    slots = math.ceil(math.ceil(batch.global_batch / data) / batch.micro_batch)
    if p.pp == 1 and config.balance.scope != "window":
        slots = 1  # one is done before the next one starts
    tokens = batch.micro_batch * config.data.seq_len * slots
    heads = model.num_attention_heads
    block = (
        40 * model.hidden_size
        + 8 * heads * (model.qk_head_dim + model.v_head_dim)
        + 4 * heads * config.data.seq_len  # scores, where the attention keeps them
        + 8 * model.num_experts_per_tok * (model.hidden_size + model.moe_intermediate_size)
        + 8 * (model.intermediate_size + model.moe_intermediate_size * model.n_shared_experts)
    )
    layers = model.num_hidden_layers + model.num_nextn_predict_layers
    each = layers * block + 8 * model.vocab_size * (1 + model.num_nextn_predict_layers)
    width = 8 if config.precision == "float64" else 4
    return 2 * (size.device + size.host) + tokens * each * width + GIB // 4


def host_memory() -> int:
    """Bytes this process may still use: what the system has available, within its control group's limit."""
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        pass  # not Linux: what is installed has to do
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            available = min(available, int(Path(limit).read_text()))
        except (OSError, ValueError):
            continue  # no such control group, or "max"
    return available


def _free(drive: Path) -> int:
    """Bytes free where ``drive`` lies, or will."""
    while not drive.exists() and drive != drive.parent:
        drive = drive.parent
    return shutil.disk_usage(drive).free


def _not_yet(config: RunConfig) -> str:
    missing = [what for what, _ in unsupported(config)]
    return f"; besides, this version does not do {', '.join(missing)} yet" if missing else ""


def _instead(path: Path | None, only_gpus: bool) -> str:
    smoke = path and (path if path.is_dir() else path.parent) / "smoke.yaml"
    if smoke and smoke != path and smoke.exists():
        return f"; what runs here is `python -m moetrain --config {smoke}`"
    return f"; {'device=cpu runs it without' if only_gpus else 'use a smaller model or more ranks'}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}{'es' if what.endswith('s') else 's'}"


def _gib(size: int) -> str:
    gib = size / 2**30
    return f"{gib:,.0f} GiB" if gib >= 10 else f"{gib:.1f} GiB"
