"""What is installed is what lies in the repository, and the tools agree on their versions."""

from __future__ import annotations

import fnmatch
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


def test_the_wheel_holds_every_module_and_nothing_else(tmp_path: Path) -> None:
    source = tmp_path / "source"
    skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("moetrain", "kernels"):
        shutil.copytree(ROOT / name, source / name, ignore=skip)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    build = "import setuptools.build_meta as b, sys; print(b.build_wheel(sys.argv[1]))"
    command = [sys.executable, "-c", build, str(tmp_path)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    present = {
        path.relative_to(root).as_posix()
        for root, package in ((ROOT, "moetrain"), (ROOT / "kernels", "moetrain_kernels"))
        for path in (root / package).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    assert packed == present


def test_hooks_use_the_versions_of_the_constraints() -> None:
    pins = dict(re.findall(r"^([\w-]+)==([^;\s]+)", (ROOT / "constraints.txt").read_text(), re.M))
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    versions = {repo["repo"].rsplit("/", 1)[-1]: repo["rev"].removeprefix("v") for repo in hooks["repos"]}
    assert versions == {"ruff-pre-commit": pins["ruff"], "mirrors-mypy": pins["mypy"]}


def test_the_constraints_satisfy_the_declared_ranges() -> None:
    """Every direct dependency that is pinned is pinned within the range that pyproject.toml promises."""
    from packaging.requirements import Requirement

    text = (ROOT / "pyproject.toml").read_text()
    pins = {
        name.lower(): version
        for name, version in re.findall(r"^([\w-]+)==([^;\s]+)", (ROOT / "constraints.txt").read_text(), re.M)
    }
    declared = [Requirement(each) for each in re.findall(r'"([A-Za-z-]+>=[\d.]+)"', text)]
    assert len(declared) > 15
    for requirement in declared:
        version = pins.get(requirement.name.lower())
        assert version is None or requirement.specifier.contains(version), requirement


def test_every_folder_with_tests_is_looked_into(pytestconfig: pytest.Config) -> None:
    """pytest passes over folders named dist unless it is told otherwise, and says nothing."""
    passed_over = pytestconfig.getini("norecursedirs")
    folders = {path.parent.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert "dist" in folders
    assert not [f for f in folders if any(fnmatch.fnmatch(f, pattern) for pattern in passed_over)]
