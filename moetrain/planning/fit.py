"""Does the run fit here? Asked before anything is allocated, so that 671B on a laptop ends in a sentence.

What is counted is a lower bound: parameters, gradients and AdamW's two moments, over the ranks there are.
Activations and buffers come on top, so a run that passes can still run out of memory, but one that is refused
could never have fitted.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from moetrain.config import RunConfig
from moetrain.config.support import unsupported
from moetrain.errors import UserError
from moetrain.model import DeepSeek
from moetrain.parallel import deep_ep


@dataclass(frozen=True)
class States:
    """Bytes of parameters, gradients and optimizer states of one rank, by where they are kept."""

    device: int
    host: int


@dataclass(frozen=True)
class Machine:
    """What a process finds: CUDA devices and free bytes of each, host bytes, ranks started here and in
    all."""

    gpus: int
    gpu_bytes: int
    host_bytes: int
    local_ranks: int
    ranks: int
    fp8: bool

    @staticmethod
    def here() -> Machine:
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
        )


def check(config: RunConfig, path: Path | None = None, machine: Machine | None = None) -> None:
    """Raise UserError where ``config`` cannot run on ``machine`` (default: this one), saying what is missing.

    ``path`` is the file the config came from; where a ``smoke.yaml`` lies beside it, the sentence names that
    as the run that works here.
    """
    machine = machine or Machine.here()
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
    elif on_gpu and device > machine.gpu_bytes:
        lacks.append(f"{_gib(device)} on each GPU for {_KEPT} (here: {_gib(machine.gpu_bytes)})")
    elif on_gpu and config.precision == "fp8" and not machine.fp8:
        lacks.append("GPUs that compute in FP8 (here: older ones)")
    if host > machine.host_bytes:
        lacks.append(f"{_gib(host)} of host memory for {_KEPT} (here: {_gib(machine.host_bytes)})")
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


_KEPT = "parameters, gradients and AdamW states"


def rank_states(config: RunConfig, ranks: int) -> States:
    """Bytes that one of ``ranks`` ranks keeps on the device and on the host.

    native: everything sharded over the data ranks, in the master format (fp32, or float64). deepspeed: weights in
    what is computed in, gradients in fp32, an fp32 master beside the moments; the ZeRO stage tells what shards.
    """
    with torch.device("meta"):  # the real model, without its memory
        parameters = sum(each.numel() for each in DeepSeek(config.model).parameters())
    master = 8 if config.precision == "float64" else 4
    moments = 2 * (2 if config.optimizer.moments == "bf16" else master)
    weights, optimizer, zero = master, moments, 3
    weights_on = optimizer_on = "none"  # offloaded to
    if config.engine == "deepspeed":
        zero = config.deepspeed.zero_stage
        weights_on, optimizer_on = config.deepspeed.offload_parameters, config.deepspeed.offload_optimizer
        weights, optimizer = 2 if config.precision in ("bf16", "fp16", "fp8") else 4, moments + master
    shards = max(1, ranks // config.parallel.dp_replicate)
    parts = (  # bytes a parameter, the ZeRO stage that shards them, where they are kept
        (weights, 3, weights_on),
        (master, 2, optimizer_on),  # gradients lie with the optimizer
        (optimizer, 1, optimizer_on),
    )
    held = {"none": 0, "cpu": 0, "nvme": 0}
    for width, stage, place in parts:
        held[place] += parameters * width // (shards if zero >= stage else 1)
    if config.engine == "native" and config.parallel.offload_states:
        return States(device=0, host=held["none"])
    return States(device=held["none"], host=held["cpu"])


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
