"""The processes of a run: which one this is, on which device, and how they talk.

``torchrun`` says in the environment how many processes there are; a run without it is one process. The same code serves
gloo on CPU and NCCL on GPUs; the choice is made here once.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moetrain.errors import UserError

TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Ranks:
    """This process among all.

    Attributes:
        rank, world: number of this process and how many there are.
        device: where this process computes.
        mesh: the data mesh, ``dp_shard`` or ``dp_replicate`` x ``dp_shard``; None where there is no process group.
        expert_mesh: the same ranks with ``dp_shard`` as ``edp`` x ``ep``: neighbours hold different experts, and the
            ranks of an ``edp`` group hold the same ones. None where every rank has all experts.
    """

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh | None
    expert_mesh: DeviceMesh | None = None

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups over which tokens are split."""
        return () if self.mesh is None else tuple(self.mesh.get_all_groups())

    def any(self, flag: bool) -> bool:
        """Whether any rank says yes; every rank must ask."""
        if self.mesh is None:
            return flag
        answer = torch.tensor(int(flag), device=self.device)
        for group in self.groups:
            dist.all_reduce(answer, op=dist.ReduceOp.MAX, group=group)
        return bool(answer.item())


def choose_device(wanted: str, local_rank: int = 0) -> torch.device:
    """``auto`` takes a GPU where there is one."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError("device: cuda is asked for, but torch sees no CUDA device here; use device=cpu")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"process {local_rank} of this machine has no GPU of its own ({torch.cuda.device_count()} present): "
            f"start torchrun with --nproc_per_node {torch.cuda.device_count()}"
        )
    return torch.device("cuda", local_rank)


@contextmanager
def started(device: str, *, need_group: bool = False, dp_replicate: int = 1, ep: int = 1) -> Iterator[Ranks]:
    """Joins the run's processes and leaves them at the end.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.
        need_group: make a process group of one also for a single process.
        dp_replicate: how many times the sharded model exists; divides the number of ranks.
        ep: expert-parallel ranks; divides the ranks of one such copy.
    """
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    where = choose_device(device, int(os.environ.get("LOCAL_RANK", 0)))
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if world == 1 and not need_group:
        yield Ranks(rank=0, world=1, device=where, mesh=None)
        return
    backend = "nccl" if where.type == "cuda" else "gloo"
    if world == 1 and "MASTER_ADDR" not in os.environ:
        dist.init_process_group(backend, timeout=TIMEOUT, store=HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group(backend, timeout=TIMEOUT, rank=rank, world_size=world)
    try:
        mesh, experts = meshes(where.type, world, dp_replicate=dp_replicate, ep=ep)
        yield Ranks(rank=rank, world=world, device=where, mesh=mesh, expert_mesh=experts)
    finally:
        dist.destroy_process_group()


def meshes(device: str, world: int, *, dp_replicate: int = 1, ep: int = 1) -> tuple[DeviceMesh, DeviceMesh | None]:
    """The data mesh and the expert mesh of ``Ranks``; neighbouring ranks share a copy, and in it an expert group."""
    shards = world // dp_replicate
    copies, name = ((dp_replicate,), ("dp_replicate",)) if dp_replicate > 1 else ((), ())
    mesh = init_device_mesh(device, (*copies, shards), mesh_dim_names=(*name, "dp_shard"))
    if ep == 1:
        return mesh, None
    return mesh, init_device_mesh(device, (*copies, shards // ep, ep), mesh_dim_names=(*name, "edp", "ep"))
