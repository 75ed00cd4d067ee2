"""From pydantic's report to one sentence: a user wants the key and the mend, not a dump of a schema.

The most telling fault is chosen: a misspelt key comes first (it usually is the cause of a missing one), then
a missing key, then a bad value. An unknown key is answered with the nearest one, also when it belongs to
another section.
"""

from __future__ import annotations

import difflib
import types
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from moetrain.config.values import shown


@dataclass(frozen=True)
class Fault:
    """One fault: where it is (dotted key, empty for the whole) and the sentence about it."""

    key: str
    text: str


_ORDER = {"extra_forbidden": 0, "invalid_key": 0, "missing": 1}


def first_sentence(error: ValidationError, root: type[BaseModel]) -> Fault:
    """The most telling fault of ``error``, which came from validating ``root``."""
    fault = min(error.errors(), key=lambda each: _ORDER.get(each["type"], 2))
    path = _path(fault["loc"], root)
    key = ".".join(path)
    kind, given = fault["type"], fault.get("input")
    if kind in ("extra_forbidden", "invalid_key"):
        return Fault(key, f"unknown key `{key}`{_nearest(path, root)}")
    if kind == "missing":
        if path and path[-1].isdigit():
            whole = ".".join(path[:-1])
            return Fault(whole, f"`{whole}` must be a list of {int(path[-1]) + 1} entries")
        return Fault(key, f"`{key}` is missing")
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        return Fault(key, f"`{key}.kind` must be one of {', '.join(_tags(path, root))}")
    message = fault["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        own = message.startswith("must")
        return Fault(key, f"`{key}` {message}" if own else f"in `{key}`: {message}" if key else message)
    for theirs, ours in _WORDS:
        message = message.replace(theirs, ours)
    return Fault(key, f"`{key}` {_MUST_BE.get(kind, message)}, not {shown(given)}")


_WORDS = (
    ("Input should be", "must be"),
    ("greater than or equal to", "at least"),
    ("less than or equal to", "at most"),
    ("False", "false"),
)
_MUST_BE = {
    "model_type": "must be a mapping of keys",
    "model_attributes_type": "must be a mapping of keys",
    "dict_type": "must be a mapping of keys",
    "tuple_type": "must be a list",
    "path_type": "must be a path",
    "string_type": "must be text (put quotes around a number that is meant as a name)",
}


def dotted_keys(root: type[BaseModel], prefix: str = "") -> list[str]:
    """Every key below ``root`` in the form ``section.key``."""
    keys: list[str] = []
    for name, field in root.model_fields.items():
        keys.append(prefix + name)
        for model in _models(field.annotation):
            keys += [key for key in dotted_keys(model, f"{prefix}{name}.") if key not in keys]
    return keys


#: what other trainers call it
_ELSEWHERE = {
    "learning_rate": "lr", "max_grad_norm": "max_norm", "grad_clip": "max_norm", "clip_grad": "max_norm",
    "gradient_clipping": "max_norm", "batch_size": "global_batch", "train_batch_size": "global_batch",
    "per_device_train_batch_size": "micro_batch", "max_steps": "steps", "train_iters": "steps", "num_steps": "steps",
    "max_length": "seq_len", "sequence_length": "seq_len", "dtype": "precision", "mixed_precision": "precision",
    "output_dir": "run_dir", "save_interval": "every", "save_steps": "every",
}  # fmt: skip


def _nearest(path: list[str], root: type[BaseModel]) -> str:
    *section, name = path
    prefix = "".join(f"{part}." for part in section)
    everywhere = dotted_keys(root)
    here = [key.removeprefix(prefix) for key in everywhere if key.startswith(prefix)]
    here = [key for key in here if "." not in key]
    if close := difflib.get_close_matches(name, here, n=1, cutoff=0.7):
        return f"; did you mean `{prefix}{close[0]}`?"
    if same := [key for key in everywhere if key.rsplit(".", 1)[-1] == name]:
        return f"; did you mean `{same[0]}`?"
    if (known := _ELSEWHERE.get(name)) in here:
        return f"; here it is `{prefix}{known}`"
    if close := difflib.get_close_matches(name, here, n=1, cutoff=0.4):
        return f"; the nearest key is `{prefix}{close[0]}`"
    return f"; the keys here are {', '.join(here)}" if here else ""


def _path(loc: tuple[int | str, ...], root: type[BaseModel]) -> list[str]:
    """``loc`` as keys of the file: without the names of union members that pydantic puts in between."""
    path: list[str] = []
    models: list[type[BaseModel]] = [root]
    for part in loc:
        fields = [model.model_fields[str(part)] for model in models if str(part) in model.model_fields]
        if fields:
            models = [model for field in fields for model in _models(field.annotation)]
        elif part in _kinds(models):
            continue
        path.append(str(part))
    return path


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The pydantic models that an annotation can hold."""
    if get_origin(annotation) is None and isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation] if "root" not in annotation.model_fields else []
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return [model for part in get_args(annotation) for model in _models(part)]
    return []


def _kinds(models: list[type[BaseModel]]) -> list[str]:
    return [model.model_fields["kind"].default for model in models if "kind" in model.model_fields]


def _tags(path: list[str], root: type[BaseModel]) -> list[str]:
    models = [root]
    for part in path:
        models = [
            m for model in models if part in model.model_fields for m in _models(model.model_fields[part].annotation)
        ]
    return _kinds(models)
