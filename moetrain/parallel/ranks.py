"""The processes of a run: which one this is, on which device, and how they talk.

``torchrun`` says in the environment how many processes there are; a run without it is one process. The same code serves
gloo on CPU and NCCL on GPUs; the choice is made here once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from moetrain.errors import LostRankError, UserError


class Farewell:
    """What a rank that ends with an error leaves in the ranks' store, for those that would wait for it in vain.

    On a connection of its own, since a store answers one question at a time, and some are long.
    """

    def __init__(self, store: Store) -> None:
        self._store: Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
        self._key = f"ended in start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def say(self, rank: int, error: BaseException) -> None:
        """The first one stays: the others end because of it."""
        while error.__cause__ is not None and not isinstance(error, UserError):
            error = error.__cause__  # pipeline stages wrap what was raised in them
        text = str(error).strip().splitlines()
        said = f"rank {rank} ended with {type(error).__name__}{': ' if text else ''}{text[0] if text else ''}"
        with suppress(RuntimeError):  # who keeps the store may be gone
            self._store.compare_set(self._key, "", said)

    def heard(self) -> str:
        """Which rank ended, and why; empty while all are there. May be asked by any thread."""
        try:
            said: bytes = self._store.get(self._key) if self._store.check([self._key]) else b""
        except RuntimeError:
            return "the process that keeps the ranks' store is gone"
        return said.decode()


@dataclass(frozen=True)
class Ranks:
    """This process among all.

    Attributes:
        rank, world: number of this process and how many there are.
        device: where this process computes.
        mesh: the data mesh, ``dp_shard`` or ``dp_replicate`` x ``dp_shard``: ranks with the same part of the model and
            other tokens; None where this rank has none beside it.
        expert_mesh: its ranks with ``dp_shard`` as ``edp`` x ``ep``: neighbours hold different experts, and the
            ranks of an ``edp`` group hold the same ones. None where every rank has all experts.
        pipe: the pipeline mesh, one dimension: ranks with the same tokens and other parts of the model. None where
            every rank has the whole model.
        ended: which rank has ended with an error, and why; empty while all are there.
        stands_for: whose implementations and dtypes are chosen, where that is not ``device`` (a dry run).
    """

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh | None
    expert_mesh: DeviceMesh | None = None
    pipe: DeviceMesh | None = None
    ended: Callable[[], str] = str
    stands_for: torch.device | None = None

    @property
    def target(self) -> torch.device:
        """The device that implementations and dtypes are chosen for."""
        return self.stands_for or self.device

    @property
    def pp(self) -> int:
        """Pipeline ranks."""
        return 1 if self.pipe is None else self.pipe.size()

    @property
    def data_world(self) -> int:
        """How many ranks see different tokens."""
        return self.world // self.pp

    @property
    def data_rank(self) -> int:
        """This one among them; neighbours, since stages are the outermost cut."""
        return self.rank % self.data_world

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups over which tokens are split."""
        return () if self.mesh is None else tuple(self.mesh.get_all_groups())

    @property
    def pipe_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Groups over which the model is cut."""
        return () if self.pipe is None else (self.pipe.get_group(),)

    def any(self, flag: bool) -> bool:
        """Whether any rank says yes; every rank must ask."""
        groups = (*self.groups, *self.pipe_groups)
        if not groups:
            return flag
        answer = torch.tensor(int(flag), device=self.device)
        for group in groups:
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
def started(
    device: str,
    *,
    need_group: bool = False,
    dp_replicate: int = 1,
    ep: int = 1,
    pp: int = 1,
    timeout_s: float = 600.0,
) -> Iterator[Ranks]:
    """Joins the run's processes and leaves them at the end.

    After an error one of several does not leave, since that waits for what others may never send: it tells them why,
    and has to end.

    Args:
        device: ``auto``, ``cpu`` or ``cuda``.
        need_group: make a process group of one also for a single process.
        dp_replicate: how many times the sharded model exists; divides the number of ranks.
        ep: expert-parallel ranks; divides the ranks of one such copy.
        pp: pipeline ranks; divides the number of ranks.
        timeout_s: how long a collective may wait for a rank.
    """
    timeout = timedelta(seconds=timeout_s)
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    where = choose_device(device, int(os.environ.get("LOCAL_RANK", 0)))
    if where.type == "cuda":
        torch.cuda.set_device(where)
    if world == 1 and not need_group:
        yield Ranks(rank=0, world=1, device=where, mesh=None)
        return
    backend = "nccl" if where.type == "cuda" else "gloo"
    alone = world == 1 and "MASTER_ADDR" not in os.environ
    store = HashStore() if alone else _own_store(timeout)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world)
    farewell = None if world == 1 else Farewell(store)
    try:
        spread = meshes(where.type, world, dp_replicate=dp_replicate, ep=ep, pp=pp, need_group=need_group)
        yield Ranks(rank, world, where, *spread, ended=str if farewell is None else farewell.heard)
    except BaseException as error:
        if farewell is None:
            dist.destroy_process_group()
        elif not isinstance(error, LostRankError):  # those say where they waited, each for itself
            farewell.say(rank, error)
        raise
    dist.destroy_process_group()


def _own_store(timeout: timedelta) -> Store:
    """Where ranks find each other. torchrun keeps one store for all its restarts, with the addresses of processes that
    are gone (pytorch issue 135712); on one node the number of restarts is everybody's, and keeps them apart."""
    store, _, _ = next(rendezvous("env://", timeout=timeout))
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if os.environ.get("WORLD_SIZE") != os.environ.get("LOCAL_WORLD_SIZE"):
        restart = "0"  # nodes count for themselves: docs/launch/torchrun.sh gives each start a store of its own
    return PrefixStore(f"start {restart}", store)


def meshes(
    device: str, world: int, *, dp_replicate: int = 1, ep: int = 1, pp: int = 1, need_group: bool = True
) -> tuple[DeviceMesh | None, DeviceMesh | None, DeviceMesh | None]:
    """The data mesh, the expert mesh and the pipeline mesh of ``Ranks``.

    Neighbouring ranks share a stage, in it a copy, and in that an expert group: what talks most is nearest.

    Args:
        need_group: a data mesh also where it has one rank.
    """
    shards = world // pp // dp_replicate
    stages, copies = ({"pp": pp} if pp > 1 else {}), ({"dp_replicate": dp_replicate} if dp_replicate > 1 else {})
    whole = _mesh(device, stages | copies | {"dp_shard": shards})
    pipe = whole["pp"] if stages else None
    alone = shards * dp_replicate == 1 and not need_group and pp > 1
    data = None if alone else whole[tuple([*copies, "dp_shard"])]
    if ep == 1:
        return data, None, pipe
    experts = _mesh(device, stages | copies | {"edp": shards // ep, "ep": ep})
    return data, experts[tuple([*copies, "edp", "ep"])], pipe


def _mesh(device: str, sizes: dict[str, int]) -> DeviceMesh:
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
