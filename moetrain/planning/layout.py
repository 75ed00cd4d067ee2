"""How a config is spread over ranks: sizes of the meshes, the window, what a pipeline rank holds, and every parameter
with the group that FSDP2 keeps it in. The same decisions as ``moetrain.parallel.plan``, without ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from moetrain.accumulate import Balance
from moetrain.config.model import ModelConfig
from moetrain.config.run import FORWARDS_FIRST, SPLIT_BACKWARD, RunConfig
from moetrain.errors import UserError
from moetrain.model import DeepSeek
from moetrain.model.deepseek import Part
from moetrain.parallel.plan import DTYPES, experts_stay_plain, needs_group
from moetrain.parallel.stages import cut, slots, stages_of
from moetrain.planning.trace import Kind, Place, one_of_each


@dataclass(frozen=True)
class Parameter:
    """One parameter as a rank of an expert group has it: its shape, and whether it is a gate's (kept in fp32)."""

    name: str
    shape: tuple[int, ...]
    gate: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def shard(self, ranks: int) -> int:
        """Elements that a rank holds of it: dimension 0 is cut, and padded to whole parts."""
        return -(-self.shape[0] // ranks) * math.prod(self.shape[1:])


@dataclass(frozen=True)
class Layout:
    """``config`` on ``world`` ranks with ``device`` (``cpu`` or ``cuda``) each."""

    config: RunConfig
    world: int
    device: str = "cuda"
    imbalance: float = 1.0
    shares: tuple[tuple[tuple[str, float], ...], ...] = ()  # by slot, of each unit (layers.3, mtp.0): where it is known

    def __post_init__(self) -> None:
        p = self.config.parallel
        each = p.pp * p.dp_replicate
        if self.world % (each * p.ep):
            sizes = {"pp": p.pp, "dp_replicate": p.dp_replicate, "ep": p.ep}
            which = " times ".join(f"parallel.{key}: {size}" for key, size in sizes.items() if size > 1)
            raise UserError(f"{which} must divide the number of GPUs ({self.world})")
        if p.dp_shard not in (-1, self.world // each):
            raise UserError(
                f"parallel.dp_shard: {p.dp_shard} with {each} stages and copies makes {p.dp_shard * each} ranks, not "
                f"{self.world}; use parallel.dp_shard=-1"
            )

    @property
    def shards(self) -> int:
        """Ranks over which a copy of a stage is sharded."""
        return self.world // self.config.parallel.pp // self.config.parallel.dp_replicate

    @property
    def expert_shards(self) -> int:
        """Ranks that hold parts of the same experts."""
        return self.shards // self.config.parallel.ep

    @property
    def data_world(self) -> int:
        return self.world // self.config.parallel.pp

    @property
    def slots(self) -> int:
        """Micro-batches of a window on a rank, those that a schedule fills up with included."""
        config = self.config
        wanted = math.ceil(math.ceil(config.batch.global_batch / self.data_world) / config.batch.micro_batch)
        return slots(config.parallel, wanted)

    @property
    def rows(self) -> int:
        """Sequences of a micro-batch: no more than a rank's share of the global batch."""
        return min(self.config.batch.micro_batch, -(-self.config.batch.global_batch // self.data_world))

    @property
    def split(self) -> bool:
        """Weight gradients come apart from the rest of a backward."""
        return self.config.parallel.pp > 1 and self.config.parallel.schedule in SPLIT_BACKWARD

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 wraps the model."""
        p = self.config.parallel
        return needs_group(self.config.precision, p) or self.world // p.pp > 1

    @property
    def plain_experts(self) -> bool:
        """Whether spread experts are left out of FSDP2."""
        p = self.config.parallel
        return p.ep > 1 and experts_stay_plain(self.config.precision, p, self.expert_shards * p.dp_replicate)

    @cached_property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype]:
        """Of the parameters that the optimizer steps, and of the computation."""
        stored, computed = DTYPES[self.config.precision]
        return stored, torch.float32 if self.config.precision == "fp8" and self.device == "cpu" else computed

    @property
    def cast(self) -> bool:
        stored, computed = self.dtypes
        return self.sharded and stored != computed

    @property
    def forwards_first(self) -> bool:
        """Whether all forwards of a window come before its first backward."""
        p = self.config.parallel
        if p.pp > 1:
            return p.schedule in FORWARDS_FIRST
        return self.balance.active and self.balance.scope == "window" and not self.config.counts_first

    @property
    def balance(self) -> Balance:
        return Balance(scope=self.config.balance.scope, **self.config.balance.losses)

    @cached_property
    def parts(self) -> list[Part]:
        """The stages, in order."""
        p, model = self.config.parallel, self.config.model
        if p.pp == 1:
            return [Part(range(model.num_hidden_layers), first=True, last=True)]
        return cut(model, p.stages, self.config.data.seq_len)

    def stages(self, rank: int) -> list[int]:
        """Of pipeline rank ``rank``."""
        return [0] if self.config.parallel.pp == 1 else stages_of(self.config.parallel, rank)

    @cached_property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """Pipeline ranks that hold as much; the first of each group has the most micro-batches in flight."""
        found: dict[tuple[int, int, bool, bool], list[int]] = {}
        for rank in range(self.config.parallel.pp):
            parts = [self.parts[stage] for stage in self.stages(rank)]
            experts = sum(self.config.model.is_moe_layer(i) for part in parts for i in part.layers)
            layers = sum(len(part.layers) for part in parts)
            held = experts, layers, any(part.first for part in parts), any(part.last for part in parts)
            found.setdefault(held, []).append(rank)
        return tuple(tuple(ranks) for ranks in found.values())

    @cached_property
    def kind(self) -> Kind:
        """What the pieces are traced with."""
        config, p = self.config, self.config.parallel
        stored, computed = self.dtypes
        fp8 = None
        if config.precision == "fp8":
            fp8 = "reference" if self.device == "cpu" or config.fp8.products == "reference" else "triton"
        gathered = self.sharded and p.reshard_after_forward and self.shards > 1
        return Kind(
            rows=self.rows,
            tokens=config.data.seq_len,
            dtype=computed,
            device=self.device,
            experts=config.experts,
            fp8=fp8,
            power_of_two=config.fp8.scales == "power_of_two",
            attention_output=config.fp8.attention_output,
            keep_weights=fp8 is not None and not (gathered or p.offload_states),
            recompute=p.recompute,
            in_place=stored == computed and not self.split and config.engine == "native",
            ep=p.ep,
            balance=self.balance,
            imbalance=self.imbalance,
            cast=self.cast,
            documents=config.data.document_mask,
        )

    def groups(self, rank: int) -> dict[Place, tuple[Parameter, ...]]:
        """Parameters of pipeline rank ``rank`` by the FSDP2 group that holds them, in the model's order."""
        model = self.config.model
        kinds = _inventory(_small(model), self.config.parallel.ep, self.cast)
        parts = [self.parts[stage] for stage in self.stages(rank)]
        depth = model.num_nextn_predict_layers
        last, first = any(part.last for part in parts), any(part.first for part in parts)
        root: list[Parameter] = []
        found: dict[Place, tuple[Parameter, ...]] = {}
        if first or (last and depth):
            root += kinds["embed"]["root"]
        for part in sorted(parts, key=lambda part: part.layers.start):
            for i in part.layers:
                for role, parameters in kinds["moe" if model.is_moe_layer(i) else "dense"].items():
                    found[f"layers.{i}", role] = parameters
        if last:
            root += kinds["end"]["root"]
            for k in range(depth):
                for role, parameters in kinds["mtp"].items():
                    if role == "root":
                        root += parameters
                    else:
                        found[f"mtp.{k}", role] = parameters
        found["root", "root"] = tuple(root)
        return found

    def ranks_of(self, place: Place) -> int:
        """Over how many ranks a group is sharded."""
        return self.expert_shards if place[1] == "experts" and self.config.parallel.ep > 1 else self.shards


def _small(model: ModelConfig) -> str:
    small, _ = one_of_each(model)
    return small.model_copy(
        update={"num_nextn_predict_layers": min(1, model.num_nextn_predict_layers)}
    ).model_dump_json()


@lru_cache(maxsize=64)
def _inventory(model: str, ep: int, gates_apart: bool) -> dict[str, dict[str, tuple[Parameter, ...]]]:
    """By part (``embed``, ``dense``, ``moe``, ``mtp``, ``end``) and role, from the real model without its memory."""
    config = ModelConfig.model_validate_json(model)
    with torch.device("meta"):
        built = DeepSeek(config)
    found: dict[str, dict[str, list[Parameter]]] = {}
    for name, p in built.named_parameters():
        where = name.split(".")
        part = "end"
        if where[0] == "embed_tokens":
            part = "embed"
        elif where[0] == "layers":
            part = "moe" if config.is_moe_layer(int(where[1])) else "dense"
        elif where[0] == "mtp":
            part = "mtp"
        role = "block" if part in ("dense", "moe") or (part == "mtp" and where[2] == "block") else "root"
        gate, experts = ".gate." in name, ".experts." in name
        if gate and gates_apart:
            role = "gate"
        shape = tuple(p.shape)
        if experts and ep > 1:
            role, shape = "experts", (shape[0] // ep, *shape[1:])
        found.setdefault(part, {}).setdefault(role, []).append(Parameter(name, shape, gate))
    return {part: {role: tuple(ps) for role, ps in roles.items()} for part, roles in found.items()}
