"""Model and optimizer as named tensors, so that a checkpoint fits any layout and any cut into parameter groups.

Reading an optimizer through torch's ``get_optimizer_state_dict`` takes a step to make state where there is none: a run
saved before its first step would count one step too many, and a parameter that never got a gradient would have state in
one run and none in the next. Here the optimizer is read as it is, and the checkpoint says what there is to load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel

from moetrain.checkpoint.runs import Run

#: parts of a parameter's name that wrappers add
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


class NamedState(Protocol):
    """Model and optimizer of one rank as named tensors; ``read_state`` and so on say how they are named."""

    def read(self) -> dict[str, Any]: ...

    def difference(self, saved: Metadata) -> str | None: ...

    def load(self, saved: Metadata, fill: Fill) -> None:
        """Sets model and optimizer; raises ValueError where that cannot be. Every rank fills as often."""
        ...


#: fills the tensors of a state in place, and replaces what is none, from the checkpoint
Fill = Callable[[dict[str, Any]], None]


class _Plain:
    """Parameters that the model has, and an optimizer that steps these."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def read(self) -> dict[str, Any]:
        return read_state(self.model, self.optimizer)

    def difference(self, saved: Metadata) -> str | None:
        return difference(_model_tensors(self.model), saved, getattr(self.model, "elsewhere", frozenset()))

    def load(self, saved: Metadata, fill: Fill) -> None:
        state = room_for(self.model, self.optimizer, saved)
        fill(state)
        write_state(self.model, self.optimizer, state)


def named_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> NamedState:
    """The optimizer's own, where it keeps parameters in a way of its own (``moetrain.engine.deepspeed``)."""
    own: NamedState | None = getattr(optimizer, "named_state", None)
    return own or _Plain(model, optimizer)


def read_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What is saved: ``model.<name>``, ``optimizer.state.<name>.<key>``, ``optimizer.param_groups.<name>.<key>``.

    The tensors are those of model and optimizer, not copies; nothing is changed.
    """
    flat: dict[str, Any] = {f"model.{name}": value for name, value in _model_tensors(model).items()}
    names = _names(model)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[parameter]
            for key, value in optimizer.state.get(parameter, {}).items():
                flat[f"optimizer.state.{name}.{key}"] = value
            for key, value in group.items():
                if key != "params":
                    flat[f"optimizer.param_groups.{name}.{key}"] = value
    return flat


def copied(state: dict[str, Any]) -> dict[str, Any]:
    """The same in host memory, and nobody else's: training goes on while it is written."""

    def copy(value: Any) -> Any:
        if isinstance(value, Run):
            return value.to_host()
        return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value

    return {key: copy(value) for key, value in state.items()}


class Described(Protocol):
    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...


def difference(
    tensors: Mapping[str, Described], saved: Metadata, elsewhere: frozenset[str] = frozenset()
) -> str | None:
    """The first of the model's ``tensors`` that is another one in the checkpoint, in words; None where all agree.

    ``elsewhere``: names of what other pipeline stages hold.
    """
    entries = saved.state_dict_metadata
    here = tensors.keys()
    for name, value in tensors.items():
        entry = entries.get(f"model.{name}")
        if not isinstance(entry, TensorStorageMetadata):
            return f"{name} is not in it"
        if entry.size != value.shape:
            return f"{name} has shape {list(entry.size)} in it and {list(value.shape)} in this run"
        if entry.properties.dtype != value.dtype:
            return f"{name} has {entry.properties.dtype} in it and {value.dtype} in this run"
    for key in entries:
        if key.startswith("model.") and key.removeprefix("model.") not in here | elsewhere:
            return f"{key.removeprefix('model.')} is in it and not in this run"
    return None


def room_for(model: nn.Module, optimizer: torch.optim.Optimizer, saved: Metadata) -> dict[str, Any]:
    """A state to load into: the model's own tensors, and for the optimizer new ones, laid out like its parameters."""
    room: dict[str, Any] = {f"model.{name}": value for name, value in _model_tensors(model).items()}
    parameters = {name: parameter for parameter, name in _names(model).items()}
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    for key, entry in saved.state_dict_metadata.items():
        kind, name, _ = split_key(key)
        parameter = parameters.get(name)
        if kind is None or parameter is None or parameter not in held:
            continue
        if isinstance(entry, BytesStorageMetadata):
            room[key] = None
        elif kind == "state" and entry.size == parameter.shape:
            room[key] = torch.zeros_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
        else:
            room[key] = torch.zeros(entry.size, dtype=entry.properties.dtype)
    return room


def write_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Sets model and optimizer to a loaded ``state``; a parameter without saved moments has none afterwards.

    Raises:
        ValueError: the parameters of one group were saved with different settings.
    """
    moments: dict[str, dict[str, Any]] = {}
    settings: dict[str, dict[str, Any]] = {}
    for full, value in state.items():
        kind, name, key = split_key(full)
        if kind is not None:
            (moments if kind == "state" else settings).setdefault(name, {})[key] = value
    names = _names(model)
    ordered = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    numbers = {name: number for number, name in enumerate(ordered)}
    groups = []
    for group in optimizer.param_groups:
        members = [names[parameter] for parameter in group["params"]]
        known = [name for name in members if name in settings]
        for name in known[1:]:
            if settings[name] != settings[known[0]]:
                raise ValueError(f"{name} has other optimizer settings in it than {known[0]}")
        saved = settings[known[0]] if known else {}
        groups.append({**group, **saved, "params": [numbers[name] for name in members]})
    set_model_state_dict(model, {k.removeprefix("model."): v for k, v in state.items() if k.startswith("model.")})
    # torch puts the step count where its implementation (fused or not) wants it
    optimizer.load_state_dict(
        {"state": {numbers[n]: values for n, values in moments.items() if n in numbers}, "param_groups": groups}
    )


def _model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, whatever wraps the model."""
    return cast("dict[str, Tensor]", get_model_state_dict(model))


def _names(model: nn.Module) -> dict[Tensor, str]:
    """Names of the parameters as in the model's state, without what wrappers add."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    names: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters():
        for wrapper in WRAPPERS:
            name = name.replace(wrapper, "")
        names[parameter] = name
    return names


def split_key(key: str) -> tuple[str | None, str, str]:
    """``optimizer.<kind>.<parameter>.<key>`` in its parts; the kind is None for anything else."""
    for kind in ("state", "param_groups"):
        prefix = f"optimizer.{kind}."
        if key.startswith(prefix):
            name, _, last = key.removeprefix(prefix).rpartition(".")
            return kind, name, last
    return None, "", ""
