"""What ZeRO holds on a rank, under the parameters' names: so checkpoints go between this engine and the native one.

ZeRO 1 and 2 lay the parameters of a group end to end and give each rank an equal stretch, so that a rank has whole
parameters, pieces, and nothing of the others. ZeRO 3 gives each rank a piece of every parameter. In both, master weight
and moments of a piece are a run of elements in flat tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from moetrain.checkpoint.runs import Run
from moetrain.checkpoint.tensors import Described, difference, split_key


class Piece(NamedTuple):
    """Elements ``first`` to ``first + size`` of a parameter are ``at`` to ``at + size`` of ``flat``."""

    flat: Tensor
    at: int
    first: int
    size: int


class _Described(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype


class ZeroState:
    """See ``moetrain.checkpoint.tensors.NamedState``.

    Args:
        model: the module inside DeepSpeed's engine.
        zero: DeepSpeed's optimizer.
        groups: names of the parameters in each of its groups.
        stage: of ZeRO.
        expert_parts, expert_part: over how many ranks experts are spread, and which of these this is.
    """

    def __init__(
        self,
        model: nn.Module,
        zero: Any,
        groups: Sequence[Sequence[str]],
        *,
        stage: int,
        expert_parts: int = 1,
        expert_part: int = 0,
    ) -> None:
        self.model, self.zero, self.stage = model, zero, stage
        self.parameters = dict(model.named_parameters())
        self.groups = {name: number for number, names in enumerate(groups) for name in names}
        self.parts, self.part = expert_parts, expert_part

    def read(self) -> dict[str, Any]:
        state: dict[str, Any] = {f"model.{name}": value for name, value in self._buffers().items()}
        for name, piece in self._pieces():
            shape = self._shape(name)
            state[f"model.{name}"] = Run(shape, piece.first, piece.flat.narrow(0, piece.at, piece.size))
            for key, value in self.zero.optimizer.state.get(piece.flat, {}).items():
                whole = value.shape == piece.flat.shape
                state[f"optimizer.state.{name}.{key}"] = (
                    Run(shape, piece.first, value.narrow(0, piece.at, piece.size)) if whole else value
                )
        for name in self.groups:
            for key, value in self._settings(name).items():
                state[f"optimizer.param_groups.{name}.{key}"] = value
        return state

    def difference(self, saved: Metadata) -> str | None:
        here: dict[str, Described] = dict(self._buffers())
        here |= {name: _Described(self._shape(name), torch.float32) for name in self.parameters}
        return difference(here, saved)

    def room_for(self, saved: Metadata) -> dict[str, Any]:
        room: dict[str, Any] = dict(self._empty())
        pieces = dict(self._pieces())
        self.zero.optimizer.state.clear()
        for key, entry in saved.state_dict_metadata.items():
            kind, name, last = split_key(key)
            if kind is None or name not in self.groups:
                continue
            if isinstance(entry, BytesStorageMetadata):
                room[key] = None
            elif kind == "state" and name in pieces:
                piece = pieces[name]
                if entry.size == self._shape(name):
                    state = self.zero.optimizer.state[piece.flat]
                    if last not in state:
                        state[last] = torch.zeros_like(piece.flat, dtype=entry.properties.dtype, requires_grad=False)
                    room[key] = Run(entry.size, piece.first, state[last].narrow(0, piece.at, piece.size))
                else:
                    room[key] = torch.zeros(entry.size, dtype=entry.properties.dtype)
        return room

    def write(self, state: dict[str, Any]) -> None:
        """What was loaded into ``room_for``'s tensors is there already; the rest, and what follows from it."""
        pieces, buffers = dict(self._pieces()), self._buffers()
        settings: dict[str, dict[str, Any]] = {}
        for full, value in state.items():
            kind, name, key = split_key(full)
            if kind is None and full.removeprefix("model.") in buffers:
                buffers[full.removeprefix("model.")].copy_(value)
            elif kind == "param_groups":
                settings.setdefault(name, {})[key] = value
            elif kind == "state" and not isinstance(value, Run):
                flat = pieces[name].flat
                self.zero.optimizer.state[flat][key] = value.to(flat.device)
        for name, saved in settings.items():
            group = self.zero.optimizer.param_groups[self.groups[name]]
            first = next(other for other in settings if self.groups[other] == self.groups[name])
            if saved != settings[first]:
                raise ValueError(f"{name} has other optimizer settings in it than {first}")
            group.update(saved)
        self._refresh()

    @torch.no_grad()
    def fill(self, masters: dict[str, Tensor]) -> None:
        """Sets master weights, which DeepSpeed has from weights that were rounded for the computation.

        ``masters``: by name, whole parameters (ZeRO 1 and 2; of experts this rank's) or this rank's part (ZeRO 3).
        """
        for name, piece in self._pieces():
            if name in masters:
                values = masters[name].flatten()
                if self.stage < 3:
                    first = self.parameters[name]._hp_mapping.lp_fragment_address.start  # type: ignore[attr-defined]
                    values = values[first : first + piece.size]
                piece.flat.detach().narrow(0, piece.at, piece.size).copy_(values[: piece.size])

    # -- where things lie -----------------------------------------------------------------------------------------

    def _pieces(self) -> Iterator[tuple[str, Piece]]:
        for name, p in self.parameters.items():
            if name not in self.groups:
                continue  # not trained
            piece = self._piece_of_part(p) if self.stage == 3 else self._piece_of_group(p)
            if piece is not None:
                mine = self.part * p.numel() if not getattr(p, "allreduce", True) else 0
                yield name, piece._replace(first=piece.first + mine)

    def _piece_of_group(self, p: Any) -> Piece | None:
        mapping = p._hp_mapping
        if mapping is None:
            return None
        flat = self.zero.single_partition_of_fp32_groups[mapping.param_group_index]
        here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
        return Piece(flat, there.start, here.start, here.numel)

    def _piece_of_part(self, p: Any) -> Piece | None:
        number, at, count = self.zero.grad_position[self.zero.get_param_id(p)]
        first = self.zero._get_param_partition_rank(p) * count
        count = min(count, p.ds_numel - first)
        return Piece(self.zero.fp32_partitioned_groups_flat[number], at, first, count) if count > 0 else None

    def _shape(self, name: str) -> torch.Size:
        p: Any = self.parameters[name]
        shape = p.ds_shape if self.stage == 3 else p.shape
        return torch.Size((shape[0] * self.parts, *shape[1:])) if not getattr(p, "allreduce", True) else shape

    def _buffers(self) -> dict[str, Tensor]:
        kept = self.model.state_dict(keep_vars=True).keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name in kept}

    def _settings(self, name: str) -> dict[str, Any]:
        group = self.zero.optimizer.param_groups[self.groups[name]]
        return {key: value for key, value in group.items() if key not in ("params", "moe", "name")}

    def _empty(self) -> Iterator[tuple[str, Any]]:
        for name, buffer in self._buffers().items():
            yield f"model.{name}", torch.empty_like(buffer)
        for name, piece in self._pieces():
            run = Run(self._shape(name), piece.first, piece.flat.detach().narrow(0, piece.at, piece.size))
            yield f"model.{name}", run

    @torch.no_grad()
    def _refresh(self) -> None:
        """The weights that are computed with, from the master weights."""
        if self.stage < 3:
            self.zero.update_lp_params()
            return
        self.zero._partition_all_parameters()
        for number in range(len(self.zero.fp16_groups)):
            self.zero._reassign_or_swap_out_partitioned_parameters(number)
        if self.zero.persistent_parameters:
            self.zero.persistent_parameters[0].all_gather(self.zero.persistent_parameters)
