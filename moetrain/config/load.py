"""Reading a run from YAML and the command line, so that the file means what it looks like.

PyYAML follows YAML 1.1, where ``1e-4`` is a string, ``off`` is false, ``1:30`` is 90 and of two equal keys
the last one silently wins. The loader here follows YAML 1.2 in these points. Every mistake becomes one
sentence that names file and key.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from moetrain.config.model import ModelConfig
from moetrain.config.run import RunConfig
from moetrain.config.sentences import Fault, first_sentence
from moetrain.errors import UserError


class _Loader(yaml.SafeLoader):
    """YAML 1.2's reading of plain words, and an error for a key that stands twice."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012  (PyYAML's own class attribute, replaced not shared)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(key.value)
            if name in seen:
                raise yaml.MarkedYAMLError(problem=f"key `{name}` stands twice", problem_mark=key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), list(_first))


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run.

    ``path`` is a YAML file, or a folder that holds a ``config.yaml``. ``model`` in it is the path of a model
    file (relative to the file), or a mapping whose optional ``base`` is such a path and whose other keys
    override it. An override ``section.key=value`` replaces one key, its value read as YAML; paths in it are
    relative to the working directory. An override of ``steps`` replaces a budget in ``tokens`` and the other
    way round.

    Raises UserError, in one sentence naming the file (or override) and key, for whatever is wrong.
    """
    file = Path(path).expanduser()
    if file.is_dir():
        file = file / "config.yaml"
    raw = _read_mapping(file)
    given = {}
    _resolve_model_paths(raw, file.parent)
    for text in overrides:
        key, value = _override(text)
        _apply(raw, key, value)
        given[key] = text
    if "steps" in given and "tokens" not in given:
        raw.pop("tokens", None)
    if "tokens" in given and "steps" not in given:
        raw.pop("steps", None)
    origin = _fill_model(raw, file)
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        fault = first_sentence(error, RunConfig)
        raise UserError(f"{_source(fault, file, given, origin)}: {fault.text}") from None


def to_yaml(config: RunConfig, comment: str = "") -> str:
    """The file that ``load_config`` reads as ``config``: every key that was given, the model whole."""
    raw = config.model_dump(mode="json", exclude_unset=True)
    raw["model"] = config.model.model_dump(mode="json")
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + str(yaml.safe_dump(raw, sort_keys=False, allow_unicode=True))


def _read_mapping(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"there is no file {file}{_other_configs(file)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{file} cannot be read: {getattr(error, 'strerror', None) or 'it is not UTF-8 text'}"
        ) from None
    try:
        content = json.loads(text) if file.suffix == ".json" else yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{file}{line}: {error.problem or 'this is not YAML'}") from None
    except (yaml.YAMLError, json.JSONDecodeError) as error:
        raise UserError(f"{file}: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} must hold keys and values, and {'is empty' if content is None else 'does not'}")
    return content


def _other_configs(file: Path) -> str:
    """What lies where the file was looked for, since the name is more often wrong than the place."""
    folder = file.parent
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    found = sorted(p for pattern in ("*.yaml", "*/config.yaml") for p in folder.glob(pattern) if p.name != "model.yaml")
    return f"; there is {', '.join(map(str, found[:4]))}" if found else ""


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", key):
        example = f"{key}=..." if re.fullmatch(r"[A-Za-z_][\w.]*", text) else "optimizer.lr=3e-4"
        raise UserError(f"override {text!r} must have the form key=value without spaces, for instance {example}")
    try:
        return key, yaml.load(value, _Loader)
    except yaml.YAMLError:
        raise UserError(f"override {text!r}: the value is not YAML (put quotes around it?)") from None


def _resolve_model_paths(raw: dict[str, Any], folder: Path) -> None:
    """Make the model's paths in the file independent of where the file lies, and the short form the long
    one."""
    model = raw.get("model")
    if isinstance(model, str):
        raw["model"] = {"base": str(folder / model)}
    elif isinstance(model, dict) and isinstance(model.get("base"), str):
        raw["model"] = {**model, "base": str(folder / model["base"])}


def _apply(raw: dict[str, Any], key: str, value: Any) -> None:
    if key == "model" and isinstance(value, str):
        value = {"base": value}
    *sections, last = key.split(".")
    place = raw
    for name in sections:
        inner = place.get(name)
        place[name] = inner if isinstance(inner, dict) else {}
        place = place[name]
    place[last] = value


def _fill_model(raw: dict[str, Any], file: Path) -> dict[str, Path]:
    """Replace ``model`` by its base with the overriding keys laid over it; tells which key came from the
    base."""
    model = raw.get("model")
    if model is None and isinstance(raw.get("init_from"), str):
        model = {"base": str(Path(raw["init_from"]).expanduser() / "config.json")}
    if not isinstance(model, dict) or "base" not in model:
        return {}
    base = model["base"]
    if not isinstance(base, str):
        raise UserError(f"{file}: `model.base` must be the path of a model file, not {base!r}")
    base_file = Path(base).expanduser()
    facts = _read_mapping(base_file)
    if base_file.suffix == ".json":
        facts = ModelConfig.from_hf(facts).model_dump()
    own = {key: value for key, value in model.items() if key != "base"}
    raw["model"] = _laid_over(facts, own)
    return {key: base_file for key in facts if key not in own}


def _laid_over(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        merged[key] = _laid_over(below, value) if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


def _source(fault: Fault, file: Path, given: dict[str, str], origin: dict[str, Path]) -> str:
    """Who said it: the override, the model file, or the run file."""
    key = fault.key
    for name, text in given.items():
        if key and f"{key}.".startswith(f"{name}."):
            return f"override {text}"
    for name, text in given.items():
        # a section that does not fit together: the override that the sentence names
        inside = not key or name.startswith(f"{key}.")
        if inside and re.search(rf"\b{re.escape(name.rpartition('.')[2])}\b", fault.text):
            return f"override {text}"
    section, _, rest = key.partition(".")
    return str(origin.get(rest.partition(".")[0], file)) if section == "model" else str(file)
