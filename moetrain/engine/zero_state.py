"""What ZeRO holds on a rank, under the parameters' names: so checkpoints go between this engine and the native one.

ZeRO 1 and 2 lay the parameters of a group end to end and give each rank an equal stretch, so that a rank has whole
parameters, pieces, and nothing of the others. ZeRO 3 gives each rank a piece of every parameter. In both, master weight
and moments of a piece are a run of elements in flat tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from moetrain.checkpoint.runs import Run
from moetrain.checkpoint.tensors import Described, Fill, difference, split_key
from moetrain.optim.adamw import Bf16Moments


class Piece(NamedTuple):
    """Elements ``first`` to ``first + size`` of a parameter are ``at`` to ``at + size`` of flat tensor ``number``."""

    number: int
    at: int
    first: int
    size: int


def _narrow(flat: Tensor, piece: Piece) -> Tensor:
    return flat.detach().narrow(0, piece.at, piece.size)


def _tensor(value: Any) -> Tensor:
    """A count of steps, which DeepSpeed's CPU Adam has in an int."""
    return value if isinstance(value, Tensor) else torch.tensor(float(value))


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
        for name, piece in self._pieces().items():
            state[f"model.{name}"] = self._run(name, piece, None)
            for key, value in self._moments(piece).items():
                full = f"optimizer.state.{name}.{key}"
                state[full] = self._run(name, piece, key) if self._is_moment(piece, value) else _tensor(value)
        for name in self.groups:
            for key, value in self._settings(name).items():
                state[f"optimizer.param_groups.{name}.{key}"] = value
        return state

    def difference(self, saved: Metadata) -> str | None:
        here: dict[str, Described] = dict(self._buffers())
        here |= {name: _Described(self._shape(name), torch.float32) for name in self.parameters}
        return difference(here, saved)

    @torch.no_grad()
    def load(self, saved: Metadata, fill: Fill) -> None:
        """One flat tensor after the other, so that what lies on a drive never is in memory as a whole."""
        rest: dict[str, Any] = {f"model.{name}": torch.empty_like(value) for name, value in self._buffers().items()}
        keys: dict[str, list[tuple[str, TensorStorageMetadata]]] = {}
        for full, entry in saved.state_dict_metadata.items():
            kind, name, key = split_key(full)
            if kind == "param_groups" and name in self.groups:
                rest[full] = None
            elif kind == "state" and isinstance(entry, TensorStorageMetadata):
                keys.setdefault(name, []).append((key, entry))
        fill(rest)
        self._set_settings(rest)
        for name, buffer in self._buffers().items():
            buffer.copy_(rest[f"model.{name}"])
        self.zero.optimizer.state.clear()
        pieces = self._pieces()
        # as torch does it, whatever they were saved in
        moments_in = torch.bfloat16 if isinstance(self.zero.optimizer, Bf16Moments) else torch.float32
        for number, flat in enumerate(self.flats):
            with self._here(number, write=True):
                state: dict[str, Any] = {}
                for name, piece in pieces.items():
                    if piece.number != number:
                        continue
                    state[f"model.{name}"] = Run(self._shape(name), piece.first, _narrow(flat, piece))
                    for key, moment in keys.get(name, ()):
                        full = f"optimizer.state.{name}.{key}"
                        if moment.size != self._shape(name):
                            state[full] = torch.zeros(moment.size, dtype=moment.properties.dtype)
                            continue
                        moments = self.zero.optimizer.state[flat]
                        if key not in moments:
                            moments[key] = torch.zeros_like(flat, dtype=moments_in, requires_grad=False)
                        state[full] = Run(self._shape(name), piece.first, _narrow(moments[key], piece))
                fill(state)
                for full, value in state.items():
                    kind, _, key = split_key(full)
                    if kind == "state" and not isinstance(value, Run):
                        counted = hasattr(self.zero.optimizer, "ds_opt_adam")  # in an int
                        self.zero.optimizer.state[flat][key] = int(value) if counted else value.to(flat.device)
        self._refresh()

    @torch.no_grad()
    def fill(self, masters: dict[str, Tensor]) -> None:
        """Sets master weights, which DeepSpeed has from weights that were rounded for the computation.

        ``masters``: by name, whole parameters (ZeRO 1 and 2; of experts this rank's) or this rank's part (ZeRO 3).
        """
        if not masters:
            return
        pieces = self._pieces()
        for number, flat in enumerate(self.flats):
            with self._here(number, write=True):
                for name, piece in pieces.items():
                    if piece.number != number:
                        continue
                    values = masters[name].flatten()
                    if self.stage < 3:
                        start = self.parameters[name]._hp_mapping.lp_fragment_address.start  # type: ignore[attr-defined]
                        values = values[start : start + piece.size]
                    _narrow(flat, piece).copy_(values[: piece.size])

    # -- what lies on a drive -----------------------------------------------------------------------------------------

    def _on_drive(self, number: int) -> bool:
        return self.stage == 3 and bool(self.zero._swappable_optimizer_subgroup(number))

    @contextmanager
    def _here(self, number: int, *, write: bool) -> Iterator[None]:
        """The flat tensor of this number and its moments are in memory; what is written in there stays."""
        if not self._on_drive(number):
            yield
            return
        self.zero._optimizer_states_and_gradient_swap_in(number)
        try:
            yield
            if write:
                self.zero._reassign_or_swap_out_partitioned_parameters(number)
        finally:
            if write:
                self.zero._optimizer_states_and_gradient_swap_out(number)
            else:
                self.zero._release_swap_buffers(number)

    def _run(self, name: str, piece: Piece, key: str | None) -> Run:
        """Master weight (None) or a moment of a piece; brought from the drive when it is written, if it lies there."""
        shape, flat = self._shape(name), self.flats[piece.number]

        def values() -> Tensor:
            return _narrow(flat if key is None else self.zero.optimizer.state[flat][key], piece)

        def bring() -> Tensor:
            with self._here(piece.number, write=False):
                return values().clone()

        if self._on_drive(piece.number):
            return Run(shape, piece.first, bring, dtype=torch.float32, count=piece.size)
        return Run(shape, piece.first, values())

    def _moments(self, piece: Piece) -> dict[str, Any]:
        moments: dict[str, Any] = self.zero.optimizer.state.get(self.flats[piece.number], {})
        return moments

    def _is_moment(self, piece: Piece, value: Any) -> bool:
        """Rather than a count of steps."""
        return isinstance(value, Tensor) and value.shape == self.flats[piece.number].shape and value.ndim == 1

    # -- where things lie -----------------------------------------------------------------------------------------

    @property
    def flats(self) -> Sequence[Tensor]:
        zero = self.zero
        flats: Sequence[Tensor] = (
            zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        )
        return flats

    def _pieces(self) -> dict[str, Piece]:
        """By flat tensor, so that each has to be brought once."""
        pieces = []
        for name, p in self.parameters.items():
            if name not in self.groups:
                continue  # not trained
            piece = self._piece_of_part(p) if self.stage == 3 else self._piece_of_group(p)
            if piece is not None:
                mine = self.part * p.numel() if not getattr(p, "allreduce", True) else 0
                pieces.append((name, piece._replace(first=piece.first + mine)))
        return dict(sorted(pieces, key=lambda item: item[1].number))

    def _piece_of_group(self, p: Any) -> Piece | None:
        mapping = p._hp_mapping
        if mapping is None:
            return None
        here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
        return Piece(mapping.param_group_index, there.start, here.start, here.numel)

    def _piece_of_part(self, p: Any) -> Piece | None:
        number, at, size = self.zero.grad_position[self.zero.get_param_id(p)]
        first = self.zero._get_param_partition_rank(p) * size
        size = min(size, p.ds_numel - first)
        return Piece(number, at, first, size) if size > 0 else None

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

    def _set_settings(self, state: dict[str, Any]) -> None:
        settings: dict[str, dict[str, Any]] = {}
        for full, value in state.items():
            kind, name, key = split_key(full)
            if kind == "param_groups":
                settings.setdefault(name, {})[key] = value
        known: dict[int, str] = {}
        for name, saved in settings.items():
            first = known.setdefault(self.groups[name], name)
            if saved != settings[first]:
                raise ValueError(f"{name} has other optimizer settings in it than {first}")
            self.zero.optimizer.param_groups[self.groups[name]].update(saved)

    @torch.no_grad()
    def _refresh(self) -> None:
        """The weights that are computed with, from the master weights."""
        if self.stage < 3:
            self.zero.update_lp_params()
            return
        self.zero._partition_all_parameters()
        for number in range(len(self.flats)):
            if not self._on_drive(number):
                self.zero._reassign_or_swap_out_partitioned_parameters(number)
        if self.zero.persistent_parameters:
            self.zero.persistent_parameters[0].all_gather(self.zero.persistent_parameters)
