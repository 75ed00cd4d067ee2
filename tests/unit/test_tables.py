"""Tables that readers trust are the plan's, today's."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLES = runpy.run_path(str(ROOT / "docs" / "tables.py"))
QUICK = "configs/236B/README.md"


@pytest.mark.parametrize(
    "file", [QUICK, *(pytest.param(file, marks=pytest.mark.slow) for file in TABLES["FILES"] if file != QUICK)]
)
def test_tables_are_what_the_plan_says(file):
    assert TABLES["with_table"](file) == (ROOT / file).read_text(), "run `make tables`"


@pytest.mark.parametrize("scale", TABLES["SCALES"])
def test_every_scale_has_gpus_that_its_config_fits_on(scale):
    """Of the table as written: the row that adds nothing but, for 671B, memory to the node."""
    rows = [line for line in (ROOT / "configs" / scale / "README.md").read_text().splitlines() if line.startswith("| ")]
    own = [row for row in rows if "| none |" in row or "| `gpu.host_memory=4.4e12` |" in row]
    assert any(row.endswith("| fits |") for row in own)
