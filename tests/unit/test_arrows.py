"""Who may import whom: the table is the architecture, and an import outside it fails, wherever it hides.

Imports inside functions and under TYPE_CHECKING count. ``trainer``, ``trial``, ``verify``, ``loop`` and ``__main__``
wire everything together and may import anything; ``moetrain/__init__.py`` names things and imports nothing at runtime.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

BELOW_TRAIN = {
    *("accumulate", "model", "precision", "parallel", "engine"),
    *("optim", "data", "checkpoint", "observe", "config"),
}

# package -> (packages of moetrain it may import besides itself, libraries besides Python's own)
ARROWS: dict[str, tuple[set[str], set[str]]] = {
    "errors": (set(), set()),
    "accumulate": (set(), {"torch"}),
    "config": ({"errors"}, {"pydantic", "yaml"}),
    "model": ({"config", "errors", "moetrain_kernels"}, {"torch", "einops"}),
    "precision": ({"config", "errors", "moetrain_kernels"}, {"torch", "deep_gemm"}),
    "parallel": ({"model", "precision", "config", "errors", "moetrain_kernels"}, {"torch", "deep_ep"}),
    "engine": (
        {"accumulate", "parallel", "precision", "optim", "model", "checkpoint", "config", "errors"},
        {"torch", "deepspeed"},
    ),
    "optim": ({"errors"}, {"torch"}),
    "data": ({"config", "errors"}, {"torch", "numpy", "tokenizers", "rich"}),
    "checkpoint": ({"model", "config", "errors", "moetrain_kernels"}, {"torch", "safetensors"}),
    "observe": ({"accumulate.report", "errors"}, {"torch", "rich"}),
    "planning": ({*BELOW_TRAIN, "errors"}, {"torch", "rich"}),
    "integrations": ({"accumulate", "errors"}, {"torch", "accelerate", "transformers"}),
    "moetrain_kernels": (set(), {"torch", "triton"}),
}
FREE = {"trainer", "trial", "verify", "loop", "__main__", "__init__"}

# (package, prefix of a module it must never reach, why)
NEVER = [("model", "torch.distributed", "the model is for one device; sharding comes from outside")]


def files() -> list[tuple[str, Path]]:
    """Every file with the package it belongs to."""
    found = [(path.relative_to(ROOT / "moetrain").parts[0], path) for path in (ROOT / "moetrain").rglob("*.py")]
    kernels = [("moetrain_kernels", path) for path in (ROOT / "kernels").rglob("*.py")]
    return [(part.removesuffix(".py"), path) for part, path in found] + kernels


def imported(source: str, package: str) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import in ``source``, a file inside ``package``, and every use of
    torch."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = ".".join(parents[: len(parents) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name.startswith("torch.") and name.replace(".", "").isidentifier():
                yield node.lineno, name


def offences(package: str, source: str, module_of_file: str) -> list[str]:
    """The forbidden imports of one file."""
    own, libraries = ARROWS[package]
    bad = []
    for line, module in imported(source, module_of_file):
        for owner, prefix, why in NEVER:
            if package == owner and f"{module}.".startswith(f"{prefix}."):
                bad.append(f"line {line}: {module} ({why})")
        top, _, rest = module.partition(".")
        if top == "moetrain":
            allowed = {package, *own}
            if rest and not any(f"{rest}.".startswith(f"{name}.") or name.startswith(f"{rest}.") for name in allowed):
                bad.append(f"line {line}: {module}")
        elif top not in sys.stdlib_module_names and top not in libraries | own | {package}:
            bad.append(f"line {line}: {module}")
    return sorted(set(bad))


@pytest.mark.parametrize(("package", "path"), files(), ids=lambda each: str(each).removeprefix(f"{ROOT}/"))
def test_only_allowed_arrows(package: str, path: Path) -> None:
    if package in FREE:
        return
    assert package in ARROWS, f"{package} is not in the table: decide what it may import"
    root = ROOT / "kernels" if package == "moetrain_kernels" else ROOT
    parents = ".".join(path.relative_to(root).parent.parts)
    assert offences(package, path.read_text(), parents) == []


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("accumulate", "from moetrain.errors import UserError"),
        ("accumulate", "import numpy"),
        ("config", "def f():\n    import torch"),
        ("model", "import torch.distributed as dist"),
        ("model", "from torch import distributed"),
        ("model", "import torch\ntorch.distributed.barrier()"),
        ("model", "from moetrain.parallel import plan"),
        ("model", "from .. import engine"),
        ("observe", "from moetrain.accumulate.ledger import RoutingLedger"),
        ("data", "if TYPE_CHECKING:\n    from moetrain.model import DeepSeek"),
        ("moetrain_kernels", "from moetrain.errors import UserError"),
        ("optim", "from moetrain import load_config"),
    ],
)
def test_a_forbidden_arrow_is_seen(package: str, line: str) -> None:
    assert offences(package, line, f"moetrain.{package}")


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("observe", "from moetrain.accumulate.report import StepReport"),
        ("model", "from moetrain_kernels.products import linear"),
        ("model", "from . import gate"),
        ("planning", "from moetrain.model.flops import parameter_counts"),
        ("accumulate", "import torch.distributed as dist"),
    ],
)
def test_an_allowed_arrow_passes(package: str, line: str) -> None:
    assert offences(package, line, f"moetrain.{package}") == []


def test_the_package_names_import_nothing_at_runtime() -> None:
    tree = ast.parse((ROOT / "moetrain" / "__init__.py").read_text())
    modules = [alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names]
    modules += [node.module or "." for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert set(modules) <= sys.stdlib_module_names


def test_kernels_is_no_package() -> None:
    """It would shadow the package `kernels` for everyone who works in the repository root."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_kernels_import_without_triton() -> None:
    code = (
        "import sys, importlib, pkgutil\n"
        "sys.modules['triton'] = None\n"
        "import moetrain_kernels\n"
        "for each in pkgutil.walk_packages(moetrain_kernels.__path__, 'moetrain_kernels.'):\n"
        "    if each.name != 'moetrain_kernels.aot' and '.triton_' not in each.name:\n"
        "        importlib.import_module(each.name)\n"
        "assert not [name for name in sys.modules if name.startswith('moetrain.')]\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "kernels")
    assert run.returncode == 0, run.stderr


def test_config_answers_without_torch() -> None:
    code = "import sys, moetrain, moetrain.config, moetrain.__main__\nassert 'torch' not in sys.modules"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
