"""The plan: what a config needs on given GPUs, how fast it is, whether it fits, and what would mend it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from moetrain.config import RunConfig
from moetrain.errors import UserError
from moetrain.model.flops import flops_per_token, parameter_counts
from moetrain.planning.hardware import GIB, Cluster
from moetrain.planning.layout import Layout
from moetrain.planning.memory import RankMemory, rank_memory
from moetrain.planning.speed import Speed, speed

#: of tensors, for the allocator's gaps, and bytes for CUDA's context, NCCL's buffers and libraries' workspaces: both
#: are assumptions, as tests/gpu has not measured them yet
GAPS, RESERVE = 0.04, 2 * GIB
#: bytes of host memory that a process with a GPU takes for itself (CUDA's libraries, Python, data): an assumption
PROCESS = 4 * GIB
#: a rank's entries over the mean, at its fullest moment: auxiliary-loss-free balancing keeps the busiest expert within
#: 4 % of the mean over all batches (MaxVio_global, arXiv 2408.15664), a single micro-batch less so; an assumption
IMBALANCE = 1.1


@dataclass(frozen=True)
class Plan:
    """``ranks``: memory of each pipeline rank; ``need`` and ``have`` bytes of the fullest GPU, margins included;
    ``host_need`` and ``host_have`` of a node's memory, ``drive_need`` and ``drive_have`` of its drives."""

    name: str
    cluster: Cluster
    config: RunConfig
    ranks: tuple[RankMemory, ...]
    speed: Speed
    slots: int
    need: int
    have: int
    host_need: int
    host_have: int
    drive_need: int
    drive_have: int

    @property
    def fits(self) -> bool:
        return self.lacks <= 0

    @property
    def lacks(self) -> int:
        """Bytes: the most that is missing anywhere, negative where something is left everywhere."""
        return max(self.need - self.have, self.host_need - self.host_have, self.drive_need - self.drive_have)

    @property
    def flops(self) -> float:
        """Of a step, by the published convention (main model, causal, no recompute)."""
        batch = self.config.batch.global_batch
        return flops_per_token(self.config.model, self.config.data.seq_len) * batch * self.config.data.seq_len

    @property
    def days(self) -> float:
        """Of the config's budget."""
        config = self.config
        tokens = config.tokens or (config.steps or 0) * config.batch.global_batch * config.data.seq_len
        return tokens / (self.speed.tokens * self.cluster.count) / 86400

    @property
    def cost(self) -> float:
        return self.days * 24 * self.cluster.count * self.cluster.hardware.price

    def to_json(self) -> dict[str, Any]:
        return {
            "config": self.name,
            "gpus": str(self.cluster),
            "hardware": dataclasses.asdict(self.cluster.hardware),
            "fits": self.fits,
            "bytes": {
                "need": self.need,
                "have": self.have,
                "host_need": self.host_need,
                "host_have": self.host_have,
                "drive_need": self.drive_need,
                "drive_have": self.drive_have,
            },
            "ranks": [dataclasses.asdict(rank) for rank in self.ranks],
            "micro_batches": self.slots,
            "seconds": {"step": self.speed.step, **self.speed.by},
            "flops": self.flops,
            "tokens_per_second_per_gpu": self.speed.tokens,
            "mfu": self.speed.mfu,
            "traffic": [dataclasses.asdict(flow) for flow in self.speed.flows],
            "days": self.days,
            "dollars": self.cost,
        }


def make_plan(
    config: RunConfig, cluster: Cluster, *, imbalance: float = IMBALANCE, fused: bool = False, every_rank: bool = True
) -> Plan:
    """``every_rank``: memory of all pipeline ranks, or of one of those that hold as much.

    Raises:
        UserError: the layout does not divide the GPUs, or cannot be planned.
    """
    cluster.computes(config)
    layout = Layout(config, cluster.count, cluster.device, imbalance if config.parallel.ep > 1 else 1.0)
    if layout.split:
        raise UserError(
            f"parallel.schedule: {config.parallel.schedule} takes weight gradients apart, and no plan covers that yet; "
            "use parallel.schedule=1f1b or interleaved_1f1b"
        )
    wanted = range(config.parallel.pp) if every_rank else [group[0] for group in layout.alike]
    ranks = tuple(rank_memory(layout, rank) for rank in wanted)
    worst = max(rank.peak for rank in ranks)
    hw, on_gpu = cluster.hardware, cluster.device == "cuda"
    host = (max(rank.host for rank in ranks) + PROCESS) * cluster.here
    need = round(worst * (1 + GAPS)) + RESERVE if on_gpu else 0
    return Plan(
        name=config.name,
        cluster=cluster,
        config=config,
        ranks=ranks,
        speed=speed(layout, cluster, fused=fused),
        slots=layout.slots,
        need=need,
        have=round(hw.memory) if on_gpu else 0,
        host_need=host if on_gpu else worst * cluster.here,
        host_have=round(hw.host_memory),
        drive_need=max(rank.drive for rank in ranks) * cluster.here,
        drive_have=round(hw.drives),
    )


# -- other layouts ----------------------------------------------------------------------------------------------------


def changed(config: RunConfig, **keys: Any) -> RunConfig | None:
    """``config`` with keys (``parallel__ep=8``) replaced; None where they do not go together."""
    raw = config.model_dump()
    for key, value in keys.items():
        where = raw
        *path, last = key.split("__")
        for part in path:
            where = where[part]
        where[last] = value
    try:
        return RunConfig.model_validate(raw)
    except ValueError:
        return None


@dataclass(frozen=True)
class Change:
    """Keys to set, more GPUs maybe, and the plan with them."""

    keys: dict[str, Any]
    plan: Plan

    def __str__(self) -> str:
        return " ".join(f"{key.replace('__', '.')}={_yaml(value)}" for key, value in self.keys.items())


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _any_number(config: RunConfig, cluster: Cluster) -> dict[str, Any]:
    """What a config needs that was written for another number of GPUs."""
    return {} if config.parallel.world_size in (None, cluster.count) else {"parallel__world_size": None}


#: levers that change the numbers a step computes with
OTHER_STEP = ("moments", "precision")


def _single_changes(config: RunConfig, cluster: Cluster) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name of the lever, and the keys; cheap ones first."""
    p, native, zero = config.parallel, config.engine == "native", config.deepspeed
    for recompute in ("selective", "full"):
        if p.recompute != recompute and p.recompute != "full":
            yield "recompute", {"parallel__recompute": recompute}
    size = config.batch.micro_batch // 2
    while size:
        yield "micro_batch", {"batch__micro_batch": size}
        size //= 2
    if config.optimizer.moments == "fp32":
        yield "moments", {"optimizer__moments": "bf16"}
    if native and p.reduce == "window":
        yield "reduce", {"parallel__reduce": "micro_batch"}
    if config.precision == "bf16" and cluster.hardware.fp8:
        yield "precision", {"precision": "fp8"}
    for ep in (2, 4, 8, 16, 32, 64):
        if ep != p.ep and config.model.n_routed_experts % ep == 0 and cluster.count % (p.pp * ep) == 0:
            yield "ep", {"parallel__ep": ep}
    if native and not p.offload_states:
        yield "offload_states", {"parallel__offload_states": True}
    if not native:
        if zero.zero_stage < 3:
            yield "engine", {"deepspeed__zero_stage": 3}
        if zero.offload_optimizer == "none":
            yield "engine", {"deepspeed__zero_stage": 3, "deepspeed__offload_optimizer": "cpu"}
        if zero.offload_parameters == "none":
            keys = {"deepspeed__zero_stage": 3, "deepspeed__offload_optimizer": "cpu"}
            yield "engine", keys | {"deepspeed__offload_parameters": "cpu"}
        yield "engine", {"engine": "native"}
        yield "engine", {"engine": "native", "parallel__offload_states": True}


def changes(plan: Plan, *, most: int = 3) -> list[Change]:
    """The changes that make it fit, by the time they lose: one key, else two, else more GPUs."""
    config, cluster = plan.config, plan.cluster
    single = list(_single_changes(config, cluster))
    found = [change for _, keys in single if (change := _fitting(config, cluster, keys))]
    if len(found) < most:
        found += [change for keys in _pairs(single) if (change := _fitting(config, cluster, keys))]
    found.sort(key=lambda change: (change.plan.speed.step, len(change.keys)))
    if len(found) < most:
        count = cluster.count * 2
        while count <= 4096:
            more_gpus = dataclasses.replace(cluster, count=count)
            keys = {"parallel__recompute": "full"} if config.parallel.recompute == "none" else {}
            if change := _fitting(config, more_gpus, keys):
                found.append(change)
                break
            count *= 2
    return found[:most]


def nearest(plan: Plan, seconds: float) -> Change | None:
    """The first change found that makes it fit on these GPUs, numbers and formats as they are; None where
    there is none, or after ``seconds``."""
    until = time.monotonic() + seconds
    single = [pair for pair in _single_changes(plan.config, plan.cluster) if pair[0] not in OTHER_STEP]
    for keys in (*(keys for _, keys in single), *_pairs(single)):
        if time.monotonic() >= until:
            break
        if change := _fitting(plan.config, plan.cluster, keys):
            return change
    return None


def _pairs(single: list[tuple[str, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """Keys of two levers."""
    for i, (lever, keys) in enumerate(single):
        yield from (keys | more for other, more in single[i + 1 :] if other != lever)


def _fitting(config: RunConfig, cluster: Cluster, keys: dict[str, Any]) -> Change | None:
    keys = keys | _any_number(config, cluster)
    other = changed(config, **keys)
    if other is None:
        return None
    try:
        plan = make_plan(other, cluster)
    except UserError:
        return None
    raw = config.model_dump()
    new = {key: value for key, value in keys.items() if _at(raw, key) != value}
    return Change(new, plan) if plan.fits else None


def _at(raw: dict[str, Any], key: str) -> Any:
    value: Any = raw
    for part in key.split("__"):
        value = value[part]
    return value


def search(config: RunConfig, cluster: Cluster) -> tuple[list[Change], list[tuple[str, str]]]:
    """Layouts of the same global batch, the fastest first, and why the others lost.

    What saves memory costs time, so nothing is planned that gives up more than a layout that fits already, and nothing
    larger than what does not fit with everything given up.
    """
    won: list[Change] = []
    lost: list[tuple[str, str]] = []
    for spread in _spreads(config, cluster):
        for size in (1, 2, 4):
            fits: list[tuple[int, ...]] = []
            savings = sorted(_savings(cluster.count), key=lambda saving: sum(saving[0]))
            for number, (given_up, keys) in enumerate([savings[-1], *savings[:-1]]):
                if any(all(a <= b for a, b in zip(other, given_up, strict=True)) for other in fits):
                    continue
                change = _planned(config, cluster, spread | {"batch__micro_batch": size} | keys)
                if change is None:
                    continue
                if change.plan.fits:
                    won.append(change)
                    if number:  # the first gives up everything there is
                        fits.append(given_up)
                    continue
                lost.append((str(change), f"lacks {change.plan.lacks / GIB:,.0f} GiB"))
                if not number:
                    break
            if not fits and (not won or won[-1].keys["batch__micro_batch"] != size):
                break
    if cluster.count <= 64:
        for size in (1, 2, 4, 8):
            change = _planned(config, cluster, _HOST | {"batch__micro_batch": size})
            if change is None or not change.plan.fits:
                break
            won.append(change)
    won.sort(key=lambda change: change.plan.speed.step)
    return won, lost


def _spreads(config: RunConfig, cluster: Cluster) -> Iterator[dict[str, Any]]:
    """Pipeline, experts and schedule."""
    model = config.model
    for pp in (1, 2, 4, 8, 16):
        if pp > 1 and (cluster.count % pp or cluster.count < 16 or pp > model.num_hidden_layers):
            continue
        for ep in (1, 8, 16, 32, 64):
            if model.n_routed_experts % ep or cluster.count % (pp * ep):
                continue
            for schedule in ("1f1b",) if pp == 1 else ("1f1b", "interleaved_1f1b"):
                yield {"parallel__pp": pp, "parallel__ep": ep, "parallel__schedule": schedule}


def _savings(gpus: int) -> Iterator[tuple[tuple[int, ...], dict[str, Any]]]:
    """What is given up for memory, as numbers that compare, and the keys."""
    for i, recompute in enumerate(("none", "selective", "full")):
        for j, reduce in enumerate(("window", "micro_batch")):
            for k, offload in enumerate((False, True) if gpus <= 16 else (False,)):
                yield (i, j, k), {
                    "parallel__recompute": recompute, "parallel__reduce": reduce, "parallel__offload_states": offload,
                }  # fmt: skip


_HOST = {
    "engine": "deepspeed", "deepspeed__zero_stage": 3, "deepspeed__offload_optimizer": "cpu",
    "deepspeed__offload_parameters": "cpu", "parallel__recompute": "full",
}  # fmt: skip


def _planned(config: RunConfig, cluster: Cluster, keys: dict[str, Any]) -> Change | None:
    """None where keys do not go together, or no plan covers them."""
    base = {"engine": "native", "parallel__dp_shard": -1, "parallel__dp_replicate": 1} | _any_number(config, cluster)
    other = changed(config, **base | keys)
    if other is None:
        return None
    raw = config.model_dump()
    shown = {key: value for key, value in base.items() if _at(raw, key) != value} | keys
    try:
        return Change(shown, make_plan(other, cluster, every_rank=False))
    except UserError:
        return None


def fewest(config: RunConfig, kind: Cluster) -> Plan | None:
    """The smallest number of GPUs of this kind that ``config`` fits on as it is."""
    kind.computes(config)
    other = changed(config, parallel__world_size=None)
    if other is None:
        return None

    def fits(units: int) -> Plan | None:
        try:
            plan = make_plan(other, dataclasses.replace(kind, count=units * unit))
        except UserError:
            return None
        return plan if plan.fits else None

    unit = config.parallel.pp * config.parallel.dp_replicate * config.parallel.ep
    less, units = 0, 1
    while (found := fits(units)) is None:
        less, units = units, 2 * units
        if units * unit > 8192:
            return None
    while units - less > 1:
        middle = (less + units) // 2
        if plan := fits(middle):
            found, units = plan, middle
        else:
            less = middle
    return found


def fp8_weight_bytes(config: RunConfig) -> int:
    """All weights in E4M3 with one fp32 scale for 128 x 128, multi-token prediction included."""
    counts = parameter_counts(config.model)
    numbers = counts.total + counts.mtp
    return numbers + numbers // (128 * 128) * 4
