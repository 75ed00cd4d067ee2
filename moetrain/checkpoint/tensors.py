"""Model and optimizer as named tensors, so that a checkpoint fits any layout and any cut into parameter groups.

Reading an optimizer through torch's ``get_optimizer_state_dict`` takes a step to make state where there is none: a run
saved before its first step would count one step too many, and a parameter that never got a gradient would have state in
one run and none in the next. Here the optimizer is read as it is, and the checkpoint says what there is to load.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.nn.parallel import DistributedDataParallel

#: parts of a parameter's name that wrappers add
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


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
    return {k: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else v for k, v in state.items()}


def difference(model: nn.Module, saved: Metadata) -> str | None:
    """The first tensor that is another one in the checkpoint, in words; None where all agree."""
    entries = saved.state_dict_metadata
    tensors = _model_tensors(model)
    here = tensors.keys()
    for name, value in tensors.items():
        entry = entries.get(f"model.{name}")
        if not isinstance(entry, TensorStorageMetadata):
            return f"{name} is not in it"
        if entry.size != value.shape:
            return f"{name} has shape {list(entry.size)} in it and {list(value.shape)} in this run"
        if entry.properties.dtype != value.dtype:
            return f"{name} has {entry.properties.dtype} in it and {value.dtype} in this run"
    elsewhere: frozenset[str] = getattr(model, "elsewhere", frozenset())  # what other pipeline stages hold
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
        kind, name, _ = _split(key)
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
        kind, name, key = _split(full)
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


def _split(key: str) -> tuple[str | None, str, str]:
    """``optimizer.<kind>.<parameter>.<key>`` in its parts; the kind is None for anything else."""
    for kind in ("state", "param_groups"):
        prefix = f"optimizer.{kind}."
        if key.startswith(prefix):
            name, _, last = key.removeprefix(prefix).rpartition(".")
            return kind, name, last
    return None, "", ""
